"""The code that the CPU tests prove, on GPUs over NCCL: the same logits, the same losses, mixed precision."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from llava_mcore.checkpoint.layout import hf_folder, iteration_folder, write_tracker
from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from tests.gpu.supported_cases import supported
from tests.helpers.cases import CASES, case_inputs, hf_logits, make_case
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.world import LAYOUTS, run_world
from tests.parallel import checks, training_checks
from tests.parallel.test_layouts import assert_same_folder, copy_hf

pytestmark = pytest.mark.gpu
NUM_GPUS = torch.cuda.device_count()
TP_AND_PP = [x for x in [(1, 1), (2, 1), (1, 2), (2, 2)] if math.prod(x) <= NUM_GPUS]
THREE_D = [x for x in LAYOUTS[1:] if math.prod(x) <= NUM_GPUS]


@pytest.mark.parametrize(("tp", "pp"), TP_AND_PP)
def test_logits_and_round_trip(tmp_path: Path, tp: int, pp: int) -> None:
    """fp32 on the GPU differs from Hugging Face on the CPU by rounding only."""
    cases, expected, runnable = [], [], supported(CASES, pp=pp)
    for case in runnable:
        root = tmp_path / case.name
        model = make_case(case, root / "hf")
        import_hf(root / "hf", root / "megatron")
        inputs = case_inputs(case, model, root / "hf")
        expected.append(hf_logits(model, inputs))
        resharded = iteration_folder(root / "resharded", 0)
        resharded.mkdir(parents=True)
        cases.append({"megatron": str(root / "megatron"), "inputs": inputs, "resharded": str(resharded)})
    results = run_world(tp * pp, checks.parity_and_reshard, tp=tp, pp=pp, cases=cases)
    worst = {}
    for i, case in enumerate(runnable):
        found = [rank[i] for rank in results if rank[i] is not None]
        worst[case.name] = max((logits - expected[i]).abs().max().item() for logits in found)
        root = tmp_path / case.name
        copy_hf(hf_folder(iteration_folder(root / "megatron", 0)), hf_folder(iteration_folder(root / "resharded", 0)))
        write_tracker(root / "resharded", 0)
        export_hf(root / "resharded", root / "out", tensor_parallel=tp)
        assert_same_folder(root / "hf", root / "out")
    print(f"tp {tp} pp {pp}: largest logit difference {max(worst.values()):.2e}")
    assert not {name: off for name, off in worst.items() if off > 1e-4}


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], dict[str, Any]]:
    """Checkpoints, and what one GPU makes of them."""
    root, checkpoints = tmp_path_factory.mktemp("one"), {}
    for name, tie in (("untied", False), ("tied", True)):
        make_hf_llava(root / f"hf-{name}", text="qwen2" if tie else "llama", tie=tie)
        import_hf(root / f"hf-{name}", root / name)
        checkpoints[name] = str(root / name)
    return checkpoints, curves(checkpoints, root / "save", 1, 1, 1)


def curves(checkpoints: dict[str, str], save_dir: Path, tp: int, pp: int, dp: int) -> dict[str, Any]:
    arguments = {"tp": tp, "pp": pp, "checkpoints": checkpoints, "save_dir": str(save_dir)}
    result: dict[str, Any] = run_world(tp * pp * dp, training_checks.curves, **arguments)[0]
    return result


@pytest.mark.parametrize(("tp", "pp", "dp"), THREE_D)
def test_loss_curves(one_gpu: tuple[dict[str, str], dict[str, Any]], tmp_path: Path, tp: int, pp: int, dp: int) -> None:
    """Every layout trains as one GPU does."""
    checkpoints, reference = one_gpu
    worst = {}
    for name, run in curves(checkpoints, tmp_path, tp, pp, dp).items():
        pairs = zip(run["loss"], reference[name]["loss"], strict=True)
        worst[name] = max(abs(a - b) / b for a, b in pairs)
        assert worst[name] <= (2e-2 if name == "bf16" else 1e-4), (name, worst[name])
    print((tp, pp, dp), json.dumps(worst))
