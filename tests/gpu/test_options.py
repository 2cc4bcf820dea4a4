"""Options that save memory or time, with Transformer Engine on GPUs: the plain run's losses within bf16's rounding."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llava_mcore.checkpoint.layout import hf_folder, iteration_folder
from llava_mcore.convert.import_hf import import_hf
from tests.gpu import option_checks
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.tiny_qwen import make_hf_qwen
from tests.helpers.world import LAYOUTS, run_world
from tests.parallel import frozen_checks

pytestmark = pytest.mark.gpu
NUM_GPUS = torch.cuda.device_count()
FITTING = [x for x in LAYOUTS if math.prod(x) <= NUM_GPUS]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("options")
    make_hf_llava(root / "hf", text_overrides={"hidden_size": 128, "intermediate_size": 256})
    import_hf(root / "hf", root / "megatron")
    return root / "megatron"


@pytest.mark.parametrize(("tp", "pp", "dp"), FITTING)
def test_options_change_rounding_only(checkpoint: Path, tmp_path: Path, tp: int, pp: int, dp: int) -> None:
    arguments = {"tp": tp, "pp": pp, "checkpoint": str(checkpoint), "save_dir": str(tmp_path)}
    runs = run_world(tp * pp * dp, option_checks.curves, **arguments)[0]
    options = option_checks.option_runs(tp, pp, dp)
    assert runs.keys() == options.keys()
    for name, run in runs.items():
        plain = runs[options[name].baseline or name]
        worst = max(abs(a - b) / b for a, b in zip(run["loss"], plain["loss"], strict=True))
        print((tp, pp, dp), f"{name}: worst relative loss difference {worst:.1e}")
        assert all(map(math.isfinite, run["loss"] + run["grad_norm"])), name
        assert worst < (0.05 if options[name].fp8 else 0.01), (name, run, plain)


RESUMES = [
    *((option_checks.save_and_resume, *x) for x in FITTING if x in ((1, 1, 1), (2, 1, 1), (1, 1, 2), (2, 1, 2))),
    *((frozen_checks.save_and_resume, *x) for x in FITTING if x in ((1, 2, 1), (1, 1, 2), (2, 2, 1))),
]


@pytest.mark.parametrize(("check", "tp", "pp", "dp"), RESUMES)
def test_a_resumed_run_goes_on_bit_for_bit(
    checkpoint: Path, tmp_path: Path, check: Callable[..., Any], tp: int, pp: int, dp: int
) -> None:
    """With every optimizer, and with parts frozen: some ranks and layers then train nothing, and Transformer Engine's
    optimizer counts its steps otherwise than torch's."""
    hf = str(hf_folder(iteration_folder(checkpoint, 0)))
    arguments = {"tp": tp, "pp": pp, "checkpoint": str(checkpoint), "save_dir": str(tmp_path), "hf": hf}
    found = run_world(tp * pp * dp, check, **arguments)[0]
    if check is frozen_checks.save_and_resume:
        expected, told = found.pop("one rank's problem")
        assert told == expected
    for name, (uninterrupted, resumed) in found.items():
        print((tp, pp, dp), name, json.dumps([uninterrupted, resumed]))
        assert resumed == uninterrupted, (name, "bitwise")


@pytest.mark.parametrize(("tp", "pp"), [(tp, pp) for tp, pp in ((1, 1), (2, 1), (1, 2)) if tp * pp <= NUM_GPUS])
def test_the_host_does_not_wait_in_forward_and_backward(checkpoint: Path, tmp_path: Path, tp: int, pp: int) -> None:
    arguments = {"tp": tp, "pp": pp, "checkpoint": str(checkpoint), "save_dir": str(tmp_path)}
    run_world(tp * pp, option_checks.step_without_waiting, **arguments)


def test_the_host_does_not_wait_with_pictures_of_any_size(tmp_path: Path) -> None:
    make_hf_qwen(tmp_path / "hf", "qwen2_5_vl")
    import_hf(tmp_path / "hf", tmp_path / "megatron")
    arguments = {"checkpoint": str(tmp_path / "megatron"), "save_dir": str(tmp_path), "hf": str(tmp_path / "hf")}
    run_world(1, option_checks.qwen_step_without_waiting, **arguments)


@pytest.mark.skipif(NUM_GPUS < 2, reason="two GPUs")
def test_ranks_begin_with_the_same_whole_tower(checkpoint: Path, tmp_path: Path) -> None:
    arguments = {"hf": str(hf_folder(iteration_folder(checkpoint, 0))), "save_dir": str(tmp_path)}
    found = run_world(2, option_checks.whole_towers_at_random, **arguments)[0]
    assert found and all(found)
