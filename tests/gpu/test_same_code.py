"""The code that the CPU tests prove, on GPUs over NCCL: the same logits, the same losses, mixed precision."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from llava_mcore.apps.export_hf import export_hf
from llava_mcore.apps.import_hf import import_hf
from llava_mcore.checkpoint.layout import hf_folder, iteration_folder, write_tracker
from tests.helpers.cases import CASES, hf_logits, make_case, make_inputs
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.world import run_world
from tests.parallel.test_layouts import assert_same_folder, copy_hf

pytestmark = pytest.mark.gpu
NUM_GPUS = torch.cuda.device_count()
LAYOUTS = [x for x in [(1, 1), (2, 1), (1, 2), (2, 2)] if math.prod(x) <= NUM_GPUS]
THREE_D = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2)]


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_logits_and_round_trip(tmp_path: Path, tp: int, pp: int) -> None:
    """fp32 on the GPU differs from Hugging Face on the CPU by rounding only."""
    cases, expected = [], []
    for case in CASES:
        root = tmp_path / case.name
        model = make_case(case, root / "hf")
        import_hf(root / "hf", root / "megatron")
        inputs = make_inputs(model)
        expected.append(hf_logits(model, inputs))
        resharded = iteration_folder(root / "resharded", 0)
        resharded.mkdir(parents=True)
        cases.append({"megatron": str(root / "megatron"), "inputs": inputs, "resharded": str(resharded)})
    results = run_world(tp * pp, "tests.parallel.checks:parity_and_reshard", tp=tp, pp=pp, cases=cases)
    worst = 0.0
    for i, case in enumerate(CASES):
        for rank in results:
            if rank[i] is not None:
                worst = max(worst, (rank[i] - expected[i]).abs().max().item())
        root = tmp_path / case.name
        copy_hf(hf_folder(iteration_folder(root / "megatron", 0)), hf_folder(iteration_folder(root / "resharded", 0)))
        write_tracker(root / "resharded", 0)
        export_hf(root / "resharded", root / "out", tp=tp)
        assert_same_folder(root / "hf", root / "out")
    print(f"tp {tp} pp {pp}: largest logit difference {worst:.2e}")
    assert worst <= 1e-4


def test_loss_curves_at_every_layout(tmp_path: Path) -> None:
    checkpoints = {}
    for name, tie in (("untied", False), ("tied", True)):
        make_hf_llava(tmp_path / f"hf-{name}", text="qwen2" if tie else "llama", tie=tie)
        import_hf(tmp_path / f"hf-{name}", tmp_path / name)
        checkpoints[name] = str(tmp_path / name)
    found: dict[tuple[int, int, int], Any] = {}
    for tp, pp, dp in (x for x in THREE_D if math.prod(x) <= NUM_GPUS):
        arguments = {"tp": tp, "pp": pp, "checkpoints": checkpoints, "save_dir": str(tmp_path / "save")}
        found[tp, pp, dp] = run_world(tp * pp * dp, "tests.parallel.training_checks:curves", **arguments)[0]
    reference = found[1, 1, 1]
    for layout, runs in found.items():
        worst = {}
        for name, run in runs.items():
            pairs = zip(run["loss"], reference[name]["loss"], strict=True)
            worst[name] = max(abs(a - b) / b for a, b in pairs)
            assert worst[name] <= (2e-2 if name == "bf16" else 1e-4), (layout, name, worst[name])
        print(layout, json.dumps(worst))
