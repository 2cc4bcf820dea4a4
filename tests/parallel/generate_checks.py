"""What the ranks of a world that answers questions run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from llava_mcore.checkpoint.dist import load_weights
from llava_mcore.checkpoint.layout import hf_folder, latest_checkpoint
from llava_mcore.convert.logits_worker import forward
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.data.samples import Conversation
from llava_mcore.inference.generation.generate import generate
from llava_mcore.inference.generation.prompt import Prompt, encode_prompt
from llava_mcore.inference.generation.settings import Settings, TokenSampling, read_settings
from llava_mcore.models.architectures.registry import architecture_of
from llava_mcore.models.configs import ModelOptions, Stages
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.parallel.groups import Groups, set_virtual_stages
from tests.parallel.checks import join, load_model


def tokens_of(
    groups: Groups, models: list[Any], folder: Path, asked: list[Conversation], settings: Settings, **options: Any
) -> list[list[int]]:
    """Return the tokens of every answer, in the order of the questions."""
    prompts: Any = None
    if groups.loads_data:
        assets = load_assets(folder)
        multiple = options.get("multiple", 1)
        prompts = (encode_prompt(x, assets, str(i), multiple=multiple) for i, x in enumerate(asked))
    fields = architecture_of(models[0].hf).fields
    each = {x.index: x.tokens for x in generate(models, groups, prompts, settings, fields, **options)}
    return [each[number] for number in range(len(asked))]


def recomputed(groups: Groups, model: Any, prompt: Prompt, num_new: int) -> list[int]:
    """Return the best tokens by whole forward passes, at (1, 1) or as the last stage."""
    media = prompt.batch.media
    ids, tokens = prompt.batch.input_ids[:, : prompt.length], []
    for _ in range(num_new):
        logits = forward(model, {"input_ids": ids, **media})
        assert logits is not None
        tokens.append(int(logits[0, -1].argmax()))
        ids = torch.cat([ids, torch.tensor([[tokens[-1]]])], dim=1)
    return tokens


def with_options(tp: int, pp: int, root: str, asked: list[Conversation], num_new: int) -> dict[str, Any]:
    """Return answers under other settings and layouts of the same model."""
    groups = join(tp, pp)
    checkpoint, _ = latest_checkpoint(Path(root))
    folder = hf_folder(checkpoint)
    model = load_model(groups, checkpoint)

    def settings(**changes: Any) -> Settings:
        sampling = TokenSampling(**{k: changes.pop(k) for k in ("temperature", "top_p", "seed") if k in changes})
        found = read_settings(folder, model.hf, None, max_new_tokens=num_new, sampling=sampling)
        found.config.update(**changes)
        return found

    plain, drawn = settings(), settings(temperature=1.0, top_p=0.9, seed=3)
    given = (groups, [model], folder, asked)
    found: dict[str, Any] = {
        "plain": tokens_of(*given, plain, num_rows=3),
        "one row": tokens_of(*given, plain, num_rows=1),
        "drawn": tokens_of(*given, drawn, num_rows=2),
        "drawn, other rows": tokens_of(*given, drawn, num_rows=4),
        "other draws": tokens_of(*given, settings(temperature=1.0, top_p=0.9, seed=4), num_rows=2),
        "penalty": tokens_of(*given, settings(repetition_penalty=1.5, no_repeat_ngram_size=2), num_rows=2),
    }
    if tp * pp == 1:
        assets = load_assets(folder)
        prompts = [encode_prompt(x, assets, "", multiple=1) for x in asked]
        found["recomputed"] = [recomputed(groups, model, prompt, num_new) for prompt in prompts]
    if tp > 1:
        divided = [load_model(groups, checkpoint, sequence_parallel=True)]
        found["sequence parallel"] = tokens_of(groups, divided, folder, asked, plain, num_rows=3, multiple=2)
    if pp > 1:
        set_virtual_stages(2)
        stages = Stages(virtual=2)
        chunks = [
            VisionLanguageModel(
                model.hf,
                ModelOptions(
                    tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, initialize=False, stages=stages
                ),
                pre_process=groups.is_first_stage and i == 0,
                post_process=groups.is_last_stage and i == 1,
                vp_stage=i,
            ).eval()
            for i in range(2)
        ]
        load_weights(chunks, checkpoint)
        found["interleaved"] = tokens_of(groups, chunks, folder, asked, plain, num_rows=3)
    return found


def answers(
    tp: int, pp: int, jobs: dict[str, tuple[str, list[Conversation]]], num_new: int, *, cp: int = 1, **options: Any
) -> dict[str, list[list[int]]]:
    """Return the tokens of every answer of every job (checkpoint, conversations). `options`: of the models."""
    groups = join(tp, pp, cp=cp)
    found = {}
    for name, (root, asked) in jobs.items():
        checkpoint, _ = latest_checkpoint(Path(root))
        model = load_model(groups, checkpoint, **options)
        folder = hf_folder(checkpoint)
        settings = read_settings(folder, model.hf, None, max_new_tokens=num_new, sampling=TokenSampling())
        found[name] = tokens_of(groups, [model], folder, asked, settings, num_rows=3, graphs=True)
    return found
