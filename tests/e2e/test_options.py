"""Flags that change how a run computes: random weights, precision, determinism."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlavaForConditionalGeneration

from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.templates.named import family_format
from llava_mcore.training.saving.hf_files import write_init_folder
from tests.helpers.commands import read_metrics
from tests.helpers.forked_training import train_forked
from tests.helpers.shards import make_dataset
from tests.helpers.tiny_hf import make_hf_llava


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("options")
    make_hf_llava(root / "hf", text_overrides={"attention_dropout": 0.1})
    import_hf(root / "hf", root / "megatron")
    make_dataset(root / "data")
    return root


def losses(root: Path, name: str, *flags: object) -> list[float]:
    places = ("--tokenizer-load-dir", root / "hf", "--data-path", root / "data", "--save-dir", root / "save")
    sizes = ("--train-iters", 3, "--micro-batch-size", 2, "--global-batch-size", 4, "--seq-length", 64, "--lr", 1e-3)
    train_forked("-g", 2, "--name", name, *places, *sizes, "data.num_workers=0", *flags)
    found: list[Any] = [m["loss"] for m in read_metrics(root / "save" / name)]
    assert len(found) == 3 and all(map(math.isfinite, found))
    return found


@pytest.mark.long
def test_deterministic_runs_from_random_weights_are_equal(root: Path) -> None:
    first = losses(root, "a", "--init", "--deterministic", "--tp", 2, "--save", "--chat-template", "plain")
    assert losses(root, "b", "--init", "--deterministic", "--tp", 2, "--chat-template", "plain") == first
    assert 5.0 < first[0] < 8.0  # about ln(401): nothing has been trained
    export_hf(root / "save" / "a", root / "exported")
    _, info = LlavaForConditionalGeneration.from_pretrained(root / "exported", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert (root / "exported" / "chat_template.jinja").read_text().endswith(family_format("plain"))


@pytest.mark.long
def test_checkpoints_have_the_tokenizer_of_training(root: Path, tmp_path: Path) -> None:
    """Not the import's; a resume with another one is refused."""
    shutil.copytree(root / "hf", tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    vocabulary = json.loads(file.read_text())
    vocabulary["added_tokens"][-1]["lstrip"] = not vocabulary["added_tokens"][-1]["lstrip"]
    file.write_text(json.dumps(vocabulary))

    def flags(tokenizer: Path, iterations: int) -> list[object]:
        places = ("--megatron-load-dir", root / "megatron", "--data-path", root / "data", "--save-dir", tmp_path)
        sizes = ("--train-iters", iterations, "--micro-batch-size", 2, "--global-batch-size", 2, "--seq-length", 64)
        saving = ("--tokenizer-load-dir", tokenizer, "--save", "--save-optim", "--load-optim", "data.num_workers=0")
        return ["-g", 1, "--name", "run", *places, *sizes, *saving]

    train_forked(*flags(tmp_path / "other", 1))
    carried = tmp_path / "run" / "iter_0000001" / "hf" / "tokenizer.json"
    assert carried.read_bytes() == file.read_bytes() != (root / "hf" / "tokenizer.json").read_bytes()
    assert "cannot be resumed with the tokenizer of" in train_forked(*flags(root / "hf", 2), expect=2)


@pytest.mark.parametrize("tie", [False, True])
def test_a_folder_without_weights_is_enough_to_start(tmp_path: Path, tie: bool) -> None:
    """Names and unused tensors are then those of transformers itself."""
    hf = make_hf_llava(tmp_path / "hf", vision="siglip", tie=tie)
    (tmp_path / "hf" / "model.safetensors").unlink()
    target = write_init_folder(tmp_path / "hf", tmp_path / "init", seed=0)
    recorded = json.loads((target / "tensors.json").read_text())["tensors"]
    expected = {name for name in hf.state_dict() if not (tie and name == "lm_head.weight")}
    assert recorded.keys() == expected
    unused = load_file(target / "unused.safetensors")
    assert {name for name in unused if "encoder.layers.3." in name}
    assert torch.equal(unused["model.vision_tower.post_layernorm.weight"], torch.ones(64))
