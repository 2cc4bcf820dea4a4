"""What the ranks of a world that answers questions run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llava_mcore.checkpoint.layout import hf_folder, latest_checkpoint
from llava_mcore.data.encoding.assets import load_assets
from llava_mcore.data.samples import Conversation
from llava_mcore.generation.generate import generate
from llava_mcore.generation.prompt import encode_prompt
from llava_mcore.generation.settings import Sampling, read_settings
from llava_mcore.models.architectures.registry import architecture_of
from tests.parallel.checks import join, load_model


def answers(
    tp: int, pp: int, jobs: dict[str, tuple[str, list[Conversation]]], num_new: int
) -> dict[str, list[list[int]]]:
    """Return the tokens of every answer of every job (checkpoint, conversations)."""
    groups = join(tp, pp)
    found = {}
    for name, (root, asked) in jobs.items():
        checkpoint, _ = latest_checkpoint(Path(root))
        model = load_model(groups, checkpoint)
        folder = hf_folder(checkpoint)
        settings = read_settings(folder, model.hf, None, max_new_tokens=num_new, sampling=Sampling())
        prompts: Any = None
        if groups.loads_data:
            assets = load_assets(folder)
            prompts = (encode_prompt(x, assets, str(i)) for i, x in enumerate(asked))
        fields = architecture_of(model.hf).fields
        each = {x.number: x.tokens for x in generate([model], groups, prompts, settings, fields, num_rows=3)}
        found[name] = [each[number] for number in range(len(asked))]
    return found
