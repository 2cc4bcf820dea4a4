"""Transformer Engine's layers against torch's and Hugging Face: logits, training, FP8, checkpoints."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from llava_mcore.checkpoint.layout import hf_folder, iteration_folder
from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.models.language.families.registry import language_family
from tests.gpu import te_checks
from tests.gpu.supported_cases import supported
from tests.gpu.te_checks import TE
from tests.helpers.cases import CASES, case_inputs, hf_logits, make_sharp_case
from tests.helpers.packages import needs
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.world import LAYOUTS, run_world
from tests.parallel import resume_checks
from tests.parallel.training_checks import MIXED, TrainingRun
from tests.parallel.validation_checks import make_material

pytestmark = pytest.mark.gpu
NUM_GPUS = torch.cuda.device_count()
FITTING = [x for x in LAYOUTS if math.prod(x) <= NUM_GPUS]


def test_bf16_logits_are_as_near_to_hugging_face_as_torchs(tmp_path: Path) -> None:
    """Every family and kind of rotary embedding, padded and packed. Losses would not show a missing factor."""
    cases, expected, able = [], [], []
    for case in supported(CASES):
        root = tmp_path / case.name
        model = make_sharp_case(case, root / "hf")
        if language_family(model.config.text_config).shape(model.config.text_config).needs_local_layers:
            continue  # those layers are refused to it
        able.append(case)
        import_hf(root / "hf", root / "megatron")
        inputs = case_inputs(case, model, root / "hf")
        expected.append(hf_logits(model, inputs))
        cases.append({"megatron": str(root / "megatron"), "inputs": inputs})
    found = run_world(1, te_checks.bf16_logits, cases=cases)[0]
    wrong = []
    for case, truth, both in zip(able, expected, found, strict=True):
        error = {
            f"{impl} {way}": (x.float() - truth).abs().mean().item()
            for impl, ways in both.items()
            for way, x in ways.items()
        }
        print(f"{case.name}: mean |logit - fp32| {json.dumps(error)}, mean |logit| {truth.abs().mean():.2f}")
        least = min(error["local padded"], error["local packed"])
        wrong += [f"{case.name}: {name} {x:.3g}, torch {least:.3g}" for name, x in error.items() if x > 1.3 * least]
    assert not wrong


def test_gradients_of_towers_for_packed_patches(tmp_path: Path) -> None:
    """Their kernels for windows and rotation are others than torch's."""
    cases = supported([case for case in CASES if case.architecture.startswith("qwen")], gradients=True)
    assert cases
    given = []
    for case in cases:
        root = tmp_path / case.name
        model = make_sharp_case(case, root / "hf")
        import_hf(root / "hf", root / "megatron")
        given.append({"megatron": str(root / "megatron"), "inputs": case_inputs(case, model, root / "hf")})
    found = run_world(1, te_checks.tower_gradients, cases=given)[0]
    for case, off in zip(cases, found, strict=True):
        print(f"{case.name}: relative differences from fp32 {off}")
    assert all(off["transformer_engine"] < 1.3 * off["local"] for off in found)


@pytest.fixture(scope="module")
def torchs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    """A checkpoint, and the losses of training it on one GPU with torch's layers."""
    root = tmp_path_factory.mktemp("torch")
    make_hf_llava(root / "hf", text_overrides={"hidden_size": 128, "intermediate_size": 256})
    import_hf(root / "hf", root / "megatron")
    checkpoint = str(root / "megatron")
    losses: list[float] = run_world(1, te_checks.torchs_losses, checkpoint=checkpoint, save_dir=str(root / "save"))[0]
    return checkpoint, losses


@pytest.mark.parametrize(("tp", "pp", "dp"), FITTING)
def test_training(torchs: tuple[str, list[float]], tmp_path: Path, tp: int, pp: int, dp: int) -> None:
    """Losses stay close to those of torch's layers at every layout, in FP8 too."""
    checkpoint, truth = torchs
    fp8 = dp == pp == 1
    arguments = {"checkpoint": checkpoint, "save_dir": str(tmp_path), "fp8": fp8}
    trained = te_checks.curve_runs(checkpoint, fp8=fp8)
    runs = run_world(tp * pp * dp, te_checks.curves, tp=tp, pp=pp, **arguments)[0]
    for name, run in runs.items():
        worst = max(abs(a - b) / b for a, b in zip(run["loss"], truth, strict=True))
        print((tp, pp, dp), name, f"worst relative loss difference {worst:.1e}", [round(x, 3) for x in run["loss"]])
        assert all(map(math.isfinite, run["loss"] + run["grad_norm"]))
        if name != "text only":
            allowed = 0.05 if te_checks.is_coarse(trained[name]) else 0.01
            assert worst < allowed, (name, run, truth)


BIASES_ALONE = {
    "model.freeze_language_model": True,
    "model.freeze_vision_model": True,
    "model.freeze_vision_projection": True,
    "model.unfreeze": "*.bias",
}


@pytest.mark.parametrize("tp", (1, 2)[:NUM_GPUS])
@pytest.mark.parametrize("nf4", [False, True], ids=["all but nf4", "nf4"])
def test_adapters(torchs: tuple[str, list[float]], tmp_path: Path, tp: int, nf4: bool) -> None:
    """On Transformer Engine's layers adapters read what the norm inside gives, also with FP8 and quantized matrices."""
    if nf4:
        needs("bitsandbytes")
    arguments = {"tp": tp, "checkpoint": torchs[0], "save_dir": str(tmp_path), "nf4": nf4}
    runs = run_world(tp, te_checks.adapters, **arguments)[0]
    trained = te_checks.adapter_runs(tp, torchs[0], nf4=nf4)
    for name, run in runs.items():
        truth = runs["local dora" if trained[name].flags.get("adapter.dora") else "local"]
        pairs = list(zip(run["loss"], truth["loss"], strict=True))
        worst = max(abs(a - b) / b for a, b in pairs)
        norm = abs(run["grad_norm"][0] / truth["grad_norm"][0] - 1)
        print(tp, name, f"worst relative loss difference {worst:.1e}, first gradient norm {norm:.1e}")
        assert all(map(math.isfinite, run["loss"] + run["grad_norm"]))
        coarse = te_checks.is_coarse(trained[name])
        assert worst < (0.05 if coarse else 0.01) and norm < (0.2 if coarse else 0.05), (name, run, truth)
    if not nf4:
        assert runs["tensorwise, no 16-bit copy"] == runs["tensorwise"], "frozen matrices are the same in FP8 always"


@pytest.mark.parametrize("trained", [{}, BIASES_ALONE], ids=["all", "biases alone"])
def test_every_gradient(torchs: tuple[str, list[float]], tmp_path: Path, trained: dict[str, Any]) -> None:
    """Of each parameter by itself: what is wrong with a bias's is not seen in a loss of bf16."""
    checkpoint, _ = torchs
    kinds = {
        "torch": TrainingRun(checkpoint, MIXED, trained),
        "te": TrainingRun(checkpoint, MIXED, TE | trained),
        "te, packed": TrainingRun(checkpoint, MIXED, TE | trained, packed=True),
    }
    truth: dict[str, float] = {}
    for tp in (1, 2)[:NUM_GPUS]:
        arguments = {"tp": tp, "save_dir": str(tmp_path), "kinds": kinds}
        ranks = run_world(tp, te_checks.gradient_squares, **arguments)
        for kind in kinds:
            norms = added_up([rank[kind] for rank in ranks])
            truth = truth or norms
            least = 1e-3 * max(truth.values())
            off = {name: abs(norms[name] - x) / max(x, least) for name, x in truth.items()}
            worst = max(off, key=lambda name: off[name])
            print(f"tp {tp}, {kind}: {worst} is off by {100 * off[worst]:.1f} %, {len(off)} gradients")
            assert norms.keys() == truth.keys() and off[worst] < 0.05


def added_up(ranks: list[dict[str, tuple[float, bool]]]) -> dict[str, float]:
    """Return the norm of every whole gradient; what each rank holds whole must be the same on all."""
    found = {}
    for name, (first, in_parts) in ranks[0].items():
        squares = [rank[name][0] for rank in ranks]
        assert in_parts or squares == pytest.approx([first] * len(ranks), rel=1e-2), (name, squares)
        found[name] = math.sqrt(sum(squares) if in_parts else first)
    return found


def test_training_does_not_notice_validation(tmp_path: Path) -> None:
    """Bit for bit, with dropout, also FP8's scales."""
    material = make_material(tmp_path, hidden_size=128, intermediate_size=256)
    arguments = {"material": material, "save_dir": str(tmp_path / "save")}
    found = run_world(1, te_checks.with_and_without_validation, **arguments)[0]
    for name, (plain, validated) in found.items():
        print(name, json.dumps(plain))
        assert validated == plain, name


def test_saved_on_a_gpu_and_read_on_a_cpu(tmp_path: Path) -> None:
    """Train and save with Transformer Engine, resume at another layout, and export."""
    make_hf_llava(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "megatron")
    carried = str(hf_folder(iteration_folder(tmp_path / "megatron", 0)))
    arguments = {
        "checkpoint": str(tmp_path / "megatron"),
        "save_dir": str(tmp_path / "save"),
        "impl": "transformer_engine",
    }
    saved = run_world(1, resume_checks.train_and_save, tp=1, pp=1, hf=carried, **arguments)
    resumed = run_world(1, resume_checks.resume_and_train, tp=1, pp=1, **arguments)
    assert resumed == saved, "bitwise"
    other = run_world(1, resume_checks.resume_and_train, tp=1, pp=1, **(arguments | {"impl": "local"}))
    for name, losses in saved[0].items():
        assert other[0][name] == pytest.approx(losses, rel=1e-2)
    export_hf(tmp_path / "save" / "plain", tmp_path / "exported")
