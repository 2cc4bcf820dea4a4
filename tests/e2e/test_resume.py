"""Kill a run with -9 and resume it: bitwise on the same layout, to 1e-5 on another one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from llava_mcore.apps.import_hf import import_hf
from llava_mcore.checkpoint.layout import write_tracker
from tests.helpers.commands import read_metrics, run, run_and_kill
from tests.helpers.shards import make_dataset
from tests.helpers.tiny_hf import make_hf_llava

ITERATIONS = 12


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("resume")
    for name, dropout in (("exact", 0.0), ("dropout", 0.1)):
        make_hf_llava(root / f"hf-{name}", text_overrides={"attention_dropout": dropout})
        import_hf(root / f"hf-{name}", root / name, tp=2)
    return {"root": root, "data": make_dataset(root / "data")}


def flags(material: dict[str, Path], name: str, model: str, tp: int, pp: int, dp: int, *more: object) -> list[Any]:
    root = material["root"]
    places = ("--megatron-load-dir", root / model, "--tokenizer-load-dir", root / f"hf-{model}")
    out = ("--save-dir", root / "save", "--data-path", material["data"], "--name", name)
    sizes = ("--micro-batch-size", 2, "--global-batch-size", 8, "--seq-length", 64, "--lr", 1e-3)
    layout = ("-g", tp * pp * dp, "--tp", tp, "--pp", pp)
    saving = ("--save", "--save-optim", "--load-optim", "--save-interval", 6, "--train-iters", ITERATIONS)
    data = ("data.num_workers=1", "data.shuffle_buffer_size=16", "model.freeze_vision_model=false")
    return [*layout, *places, *out, *sizes, *saving, *data, *more]


# layout, a layout with another data-parallel size, the model (exact or with dropout), more flags
CASES: dict[str, Any] = {
    "dropout": ((2, 1, 1), None, "dropout", []),
    "distributed": ((1, 1, 2), (1, 2, 1), "exact", ["--dist-optim"]),
}


@pytest.mark.parametrize("case", CASES)
def test_killed_and_resumed_equals_unbroken(material: dict[str, Path], case: str) -> None:
    layout, other, model, more = CASES[case]
    save = material["root"] / "save"
    run("train/run.py", *flags(material, f"{case}-whole", model, *layout, *more))
    whole = read_metrics(save / f"{case}-whole")
    assert [m["iteration"] for m in whole] == list(range(1, ITERATIONS + 1))

    again = flags(material, f"{case}-broken", model, *layout, *more)
    run_and_kill(save / f"{case}-broken", 8, "train/run.py", *again)
    run("train/run.py", *again)
    broken = read_metrics(save / f"{case}-broken")
    for key in ("iteration", "loss", "grad_norm", "lr", "num_tokens", "consumed_samples", "num_conversations"):
        assert [m[key] for m in broken] == [m[key] for m in whole], key

    if other is None:
        return
    moved = save / f"{case}-moved"  # the state after iteration 6, continued on another layout
    moved.mkdir()
    shutil.copytree(save / f"{case}-whole" / "iter_0000006", moved / "iter_0000006")
    write_tracker(moved, 6)
    run("train/run.py", *flags(material, f"{case}-moved", model, *other, *more))
    losses = [m["loss"] for m in read_metrics(moved)]
    assert losses == pytest.approx([m["loss"] for m in whole[6:]], rel=1e-5)
