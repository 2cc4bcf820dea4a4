"""Kill a run with -9 and resume it: the rest is equal bit for bit (tests/parallel resume at other layouts).

LLaVA's run is killed and resumed as a user types it, with torchrun. Ranks of the others are forked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llava_mcore.convert.import_hf import import_hf
from llava_mcore.data.encode.assets import load_assets
from tests.helpers.commands import read_metrics, run, run_and_kill
from tests.helpers.forked_training import train_forked
from tests.helpers.shards import make_dataset
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.tiny_qwen import make_hf_qwen
from tests.parallel.test_any_size import filmed, resized


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("resume")
    make_hf_llava(root / "hf-llava")
    import_hf(root / "hf-llava", root / "llava", tensor_parallel=2)
    make_hf_qwen(root / "hf-qwen", "qwen2_5_vl", text_overrides={"attention_dropout": 0.1})
    import_hf(root / "hf-qwen", root / "qwen", tensor_parallel=2)
    make_hf_qwen(root / "hf-qwen3", "qwen3_vl", text_overrides={"attention_dropout": 0.1})
    import_hf(root / "hf-qwen3", root / "qwen3", pipeline_parallel=2)
    sizes = {i: {"jpg": None, "png": resized(i)} | (filmed(i) if i % 3 == 0 else {}) for i in range(60)}
    make_dataset(root / "films", num_samples=60, replace=sizes, sample_type="CrudeWebdataset")
    data = make_dataset(root / "data", num_samples=60, num_shards=3)
    split = "split_parts: {train: [000000.tar, 000001.tar], val: [000002.tar], test: []}\nexclude: []\n"
    (data / ".nv-meta" / "split.yaml").write_text(split)
    return {"root": root, "data": data}


def flags(material: dict[str, Path], name: str, model: str, tp: int, pp: int, dp: int, *more: object) -> list[Any]:
    root = material["root"]
    places = ("--megatron-load-dir", root / model, "--tokenizer-load-dir", root / f"hf-{model}")
    out = ("--save-dir", root / "save", "--data-path", material["data"], "--name", name)
    sizes = ("--micro-batch-size", 2, "--global-batch-size", 8, "--seq-length", 64, "--lr", 1e-3)
    layout = ("-g", tp * pp * dp, "--tp", tp, "--pp", pp)
    saving = ("--save", "--save-optim", "--load-optim")
    data = ("data.num_workers=1", "data.shuffle_buffer_size=16", "model.freeze_vision_model=false")
    return [*layout, *places, *out, *sizes, *saving, *data, *more]


def validations(run_dir: Path, name: str = "validation.jsonl") -> list[dict[str, Any]]:
    """Return a file of JSON lines without the times."""
    file = run_dir / name
    lines = file.read_text().splitlines() if file.is_file() else []
    return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in lines]


# 8 iterations of 4 samples, then 4 of 8; 6 samples are no iteration more. It is saved in the middle of both.
RAMP = ("--rampup-batch-size", "4,4,32", "--train-samples", 8 * 4 + 4 * 8 + 6, "--skip-train-iteration-range", "8-9")
WSD = ("--lr-decay-style", "WSD", "--lr-wsd-decay-style", "linear", "--lr-wsd-decay-iters", 8)
ASKS = ("--eval-generate", 4, "--eval-generate-samples", 5, "--eval-generate-max-new-tokens", 4)
PIXELS = ("--min-pixels", 700, "--max-pixels", 5000, "--video-max-pixels", 6000)
VALIDATES = ("--eval-interval", 4)
QWEN = ("--train-iters", 6, "--save-interval", 3, "--global-batch-size", 4, "--packing")


def check_pixels_were_carried(save: Path) -> None:
    """The checkpoint of the resumed run has the limits of pixels that it was given."""
    assets = load_assets(save / "qwen-broken" / "iter_0000006" / "hf")
    assert (assets.pixels.smallest, assets.pixels.largest) == (700, 5000)
    assert assets.video_pixels.largest == 6000


def check_schedules(save: Path) -> None:
    """Validations, answers, batch sizes and learning rates are those of the flags."""
    whole, found = read_metrics(save / "llava-whole"), validations(save / "llava-whole")
    assert [line["iteration"] for line in found] == [4, 8, 12] and found[0]["loss"] > found[-1]["loss"]
    answers = validations(save / "llava-whole", "answers.jsonl")
    assert [line["iteration"] for line in answers] == [4, 8, 12]
    assert [m["consumed_samples"] for m in whole[6:]] == [28, 32, 40, 48, 56, 64]
    rates = [m["lr_by_part"] for m in whole if m["lr_by_part"]]
    assert all(rate["vision_model"] == pytest.approx(2 * rate["language_model"]) for rate in rates)
    assert rates[-1]["language_model"] < rates[1]["language_model"] == 1e-3


@dataclass(frozen=True)
class Case:
    """How a model is trained.

    layout: tp, pp, dp.
    iterations: of the run. It is killed after two thirds of them, and saves half way.
    films: on images and videos of many sizes.
    as_typed: whether the run that is killed and resumed is started as a user does.
    check: of the folder of both runs.
    """

    layout: tuple[int, int, int]
    iterations: int
    flags: Sequence[object]
    films: bool = False
    as_typed: bool = False
    check: Callable[[Path], None] | None = None


CASES = {
    "llava": Case(
        (1, 1, 2),
        12,
        ["--save-interval", 6, *RAMP, *WSD, *ASKS, *VALIDATES, "--dist-optim", "optimizer.vision_lr=2e-3"],
        as_typed=True,
        check=check_schedules,
    ),
    "qwen": Case((2, 1, 1), 6, [*QWEN, *PIXELS], films=True, check=check_pixels_were_carried),
    "qwen3": Case((1, 2, 1), 6, [*QWEN, "--max-pixels", 5000], films=True),
}
"""By model. Qwen's have dropout."""


def flags_of(material: dict[str, Path], name: str, run_name: str) -> list[Any]:
    """Return the flags of a case."""
    case = CASES[name]
    films = ("--data-path", material["root"] / "films", "--seq-length", 192) if case.films else ()
    return flags(material, run_name, name, *case.layout, *films, *case.flags)


@pytest.mark.parametrize("name", ["llava", *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen", "qwen3"))])
def test_killed_and_resumed_equals_unbroken(material: dict[str, Path], name: str) -> None:
    save, case = material["root"] / "save", CASES[name]
    train_forked(*flags_of(material, name, f"{name}-whole"))
    whole = read_metrics(save / f"{name}-whole")
    assert [m["iteration"] for m in whole] == list(range(1, case.iterations + 1))

    again, killed_at = flags_of(material, name, f"{name}-broken"), 2 * case.iterations // 3
    if case.as_typed:
        run_and_kill(save / f"{name}-broken", killed_at, "train/run.py", *again)
        run("train/run.py", *again)
    else:
        train_forked(*again, kill_at=killed_at)
        assert len(read_metrics(save / f"{name}-broken")) < case.iterations, "it was not killed in time"
        train_forked(*again)
    broken = read_metrics(save / f"{name}-broken")
    for key in (
        *("iteration", "loss", "grad_norm", "lr", "lr_by_part", "num_tokens", "consumed_samples"),
        *("num_conversations", "skipped_iterations"),
    ):
        assert [m[key] for m in broken] == [m[key] for m in whole], key
    for file in ("validation.jsonl", "answers.jsonl"):
        assert validations(save / f"{name}-broken", file) == validations(save / f"{name}-whole", file)
    if case.check is not None:
        case.check(save)
