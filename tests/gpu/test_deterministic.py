"""`--deterministic` on GPUs: two runs of 30 steps through run.py and the real loader, bit for bit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from llava_mcore.convert.import_hf import import_hf
from tests.helpers.commands import read_metrics, run
from tests.helpers.shards import make_dataset
from tests.helpers.tiny_hf import make_hf_llava

pytestmark = pytest.mark.gpu
NUM_GPUS = torch.cuda.device_count()
ITERATIONS = 30
TE, TORCH = "model.transformer_impl=transformer_engine", "model.transformer_impl=local"
# name -> GPUs, model, flags
CASES: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "torch's layers, dropout": (1, "dropout", (TORCH, "model.freeze_vision_model=false")),
    "Transformer Engine, packed": (1, "exact", (TE, "--packing", "model.freeze_vision_model=false")),
    "Transformer Engine, recomputed": (1, "exact", (TE, "--recompute", "full")),
    "tp 2": (2, "exact", (TE, "--packing", "--tp", "2", "--sequence-parallel", "--dist-optim")),
    "pp 2": (2, "exact", (TE, "--packing", "--pp", "2")),
    "dp 2": (2, "exact", (TE, "--packing", "--dist-optim")),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("deterministic")
    for name, dropout in (("exact", 0.0), ("dropout", 0.1)):
        sizes = {"hidden_size": 128, "intermediate_size": 256, "attention_dropout": dropout}
        make_hf_llava(root / f"hf-{name}", text_overrides=sizes)
        import_hf(root / f"hf-{name}", root / name)
    make_dataset(root / "data")
    return root


@pytest.mark.parametrize("case", [name for name, (gpus, *_) in CASES.items() if gpus <= NUM_GPUS])
def test_equal_runs_give_equal_bits(root: Path, case: str) -> None:
    first, second = (curve(root, case, number) for number in (1, 2))
    assert len(first) == ITERATIONS and all(map(math.isfinite, (x for pair in first for x in pair)))
    assert first[-1][0] < first[0][0], "it has trained something, so the updates are in what is compared"
    assert first == second, [i + 1 for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]


def curve(root: Path, case: str, number: int) -> list[tuple[float, float]]:
    """Train once; return every step's loss and gradient norm, in full precision."""
    gpus, model, flags = CASES[case]
    name = f"{list(CASES).index(case)}-{number}"
    places = ("--megatron-load-dir", root / model, "--tokenizer-load-dir", root / f"hf-{model}", "--name", name)
    out = ("--data-path", root / "data", "--save-dir", root / "save", "--train-iters", ITERATIONS, "--lr", 1e-3)
    sizes = ("-g", gpus, "--micro-batch-size", 2, "--global-batch-size", 8, "--seq-length", 128)
    run("train/run.py", "--deterministic", *places, *out, *sizes, *flags)
    return [(m["loss"], m["grad_norm"]) for m in read_metrics(root / "save" / name)]
