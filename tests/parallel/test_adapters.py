"""An adapter is trained as Hugging Face with PEFT trains it, at every layout, and resumed exactly."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from llava_mcore.adapters.adapter_record import Base
from llava_mcore.adapters.linear_layers import model_layers
from llava_mcore.checkpoint.layout import hf_folder, latest_checkpoint
from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.convert.load_model import load_model
from llava_mcore.convert.logits_worker import forward
from llava_mcore.errors import ConversionError
from llava_mcore.models.architectures.hf_config import load_hf_config
from tests.helpers.cases import EACH_CLASS, Case, case_inputs, hf_inputs, hf_logits, make_case, make_inputs
from tests.helpers.fixed_dropout import RATE
from tests.helpers.peft_models import (
    PROJECTOR,
    TEXT,
    TOWER,
    make_peft_folder,
    open_hf,
    open_hf_in_4_bits,
    open_peft,
    train_peft,
    used_linears,
)
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.world import run_world
from tests.parallel import adapter_checks

LAYOUTS: list[Any] = [
    (1, 1, 1),
    pytest.param((2, 2, 1), marks=pytest.mark.long),
    pytest.param((1, 1, 2), marks=pytest.mark.long),
    (2, 1, 1),
    pytest.param((1, 2, 1), marks=pytest.mark.long),
]
"""tp (with sequence parallelism), pp, dp (with the distributed optimizer)."""
WHOLE = ((1, 1, 1),)
"""Layouts that train all 20 steps; the others train the first ones of the same schedule."""
FIRST_STEPS = 6
CLASSES = [
    Case("siglip", "phi3"),
    Case("clip", "gemma2", {"tie": True}),
    Case("siglip", "llama", architecture="idefics3"),
]
"""Files with fused matrices, norms after matrices, a matrix whose divided outputs are gathered."""
KINDS: dict[str, dict[str, Any]] = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}
ONE = (1, 1, 1)
ONE_PROCESS = "rslora"
"""The kind that is LoRA except for a factor, which no layout divides: one layout is enough."""
WITHOUT_DROPOUT = {f"{kind}-dropout": kind for kind in ("lora", "dora")}
DROPPED: dict[str, dict[str, Any]] = {
    name: KINDS[kind] | {"lora_dropout": RATE} for name, kind in WITHOUT_DROPOUT.items()
}
WIDE = "lora-wide"
FROZEN = "frozen"
"""Has its own embedding and output layer, whose rows two ranks cannot divide without padding."""
DECAY, TEXT_ONLY = 0.01, {1, 4, 5, 6, 7}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, imported, and PEFT's adapters on it: every linear layer of every part, ranks that differ by part."""
    root = tmp_path_factory.mktemp("adapters")
    make_hf_llava(root / "hf")
    import_hf(root / "hf", root / "megatron")
    make_hf_llava(root / "hf-wide", text_overrides={"hidden_size": 128, "intermediate_size": 256})
    import_hf(root / "hf-wide", root / "wide")
    common: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": used_linears(root / "hf", [TOWER, PROJECTOR, TEXT]),
        "rank_pattern": {".*vision_tower.*": 2, "linear_1": 3},
    }
    for name, options in (KINDS | DROPPED).items():
        make_peft_folder(root / "hf", root / name, **common, **options)
    make_peft_folder(root / "hf-wide", root / WIDE, **common)
    make_peft_folder(root / "hf", root / FROZEN, **common, use_rslora=True, modules_to_save=["lm_head", "embed_tokens"])
    for case in CLASSES:
        make_case(case, root / f"hf-{case.name}")
        import_hf(root / f"hf-{case.name}", root / case.name)
    return root


@pytest.fixture(scope="module")
def found(folders: Path) -> Callable[[Any], Any]:
    """Returns what a layout has found: curves, masks that were drawn, and the 4-bit model's logits."""
    wide = {"checkpoint": str(folders / "wide"), "adapter": str(folders / WIDE)}

    @functools.cache
    def of(layout: tuple[int, int, int]) -> Any:
        tp, pp, dp = layout
        ranks = run_world(
            tp * pp * dp, adapter_checks.curves, tp=tp, pp=pp, dp=dp,
            checkpoint=str(folders / "megatron"), wide=wide | {"inputs": make_inputs(open_hf(folders / "hf-wide"))},
            adapters={name: str(folders / name) for name in KINDS if name != ONE_PROCESS or layout == ONE},
            dropped={name: str(folders / name) for name in DROPPED},
            classes={case.name: str(folders / case.name) for case in CLASSES}, save_dir=str(folders / "save"),
            num_steps=20 if layout in WHOLE else FIRST_STEPS,
        )  # fmt: skip
        for name in ("curves", "masks"):
            assert all(rank[name] == ranks[0][name] for rank in ranks), f"ranks disagree about {name}"
        return ranks[0] | {"logits": ranks[-1]["logits"]}

    return of


@pytest.fixture(scope="module")
def results(found: Any) -> Callable[[Any], Any]:
    """Returns the curves of a layout."""
    return lambda layout: found(layout)["curves"]


@pytest.fixture(scope="module")
def peft(folders: Path, results: Any) -> dict[str, Any]:
    """The same curves by PEFT."""
    one = results((1, 1, 1))
    given: dict[str, Any] = {"decay": DECAY, "text_only": TEXT_ONLY}
    curves = {name: train_peft(folders / "hf", folders / name, one[name]["lr"], **given) for name in (*KINDS, *DROPPED)}
    wide = train_peft(folders / "hf-wide", folders / WIDE, one["nf4"]["lr"], in_4_bits=True, **given)
    return curves | {"nf4": wide}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != ONE_PROCESS])
def test_steps_are_those_of_peft(results: Any, peft: Any, kind: str, layout: tuple[int, int, int]) -> None:
    assert_same_curve(results(layout)[kind], peft[kind], layout, 1e-6)


def test_twenty_steps_of_rslora_are_those_of_peft(results: Any, peft: Any) -> None:
    assert_same_curve(results(ONE)[ONE_PROCESS], peft[ONE_PROCESS], ONE, 1e-6)


def assert_same_curve(
    here: dict[str, Any], reference: dict[str, Any], layout: tuple[int, int, int], tolerance: float
) -> None:
    """Compare losses, relative to a tolerance, and gradient norms, relative to ten times as much."""
    num_steps = 20 if layout in WHOLE else FIRST_STEPS
    assert len(here["loss"]) == num_steps and here["loss"][-1] < (0.95 if num_steps == 20 else 1) * here["loss"][0]
    assert here["loss"] == pytest.approx(reference["loss"][:num_steps], rel=tolerance)
    assert here["grad_norm"] == pytest.approx(reference["grad_norm"][:num_steps], rel=10 * tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_qlora_trains_as_peft_on_a_model_in_4_bits(results: Any, peft: Any, layout: tuple[int, int, int]) -> None:
    assert_same_curve(results(layout)["nf4"], peft["nf4"], layout, 1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_in_4_bits_are_those_of_peft(found: Any, folders: Path, layout: tuple[int, int, int]) -> None:
    logits = found(layout)["logits"]
    base = open_hf_in_4_bits(folders / "hf-wide")
    inputs = make_inputs(base)
    expected = hf_logits(PeftModel.from_pretrained(base, folders / WIDE).train(), inputs)
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    exact = hf_logits(open_peft(folders / "hf-wide", {"default": folders / WIDE}), inputs)
    assert (logits - exact).abs().max() > 1e-2 * expected.abs().max(), "4 bits matter"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", DROPPED)
def test_dropout_is_that_of_peft(results: Any, peft: Any, kind: str, layout: tuple[int, int, int]) -> None:
    """With the same masks in both; without them nothing would be equal."""
    here, reference = results(layout)[kind], peft[kind]
    assert here["loss"] == pytest.approx(reference["loss"], rel=1e-6)
    assert here["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)
    without = peft[WITHOUT_DROPOUT[kind]]["loss"][: len(here["loss"])]
    assert here["loss"] != pytest.approx(without, rel=1e-3)


@pytest.mark.parametrize("layout", [LAYOUTS[1], LAYOUTS[3]])
def test_ranks_draw_the_same_masks_for_the_same_inputs_only(found: Any, layout: tuple[int, int, int]) -> None:
    masks = found(layout)["masks"]
    for name in DROPPED:
        assert masks[name] == {"column": True, "row": False}
        assert masks[f"{name}, sequence parallel"] == {"column": False, "row": False}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packing_and_recomputation_change_nothing(results: Any, layout: tuple[int, int, int]) -> None:
    here, reference = results(layout), results((1, 1, 1))
    assert here["packed"]["loss"] == pytest.approx(reference["recomputed"]["loss"], rel=1e-5)
    assert here["recomputed"]["loss"] == pytest.approx(reference["recomputed"]["loss"], rel=1e-6)
    assert here["recomputed"]["grad_norm"] == pytest.approx(reference["recomputed"]["grad_norm"], rel=1e-5)
    if layout[1] > 1:
        assert here["interleaved"]["loss"] == pytest.approx(reference["recomputed"]["loss"], rel=1e-6)
    assert here["bf16"]["loss"] == pytest.approx(reference["recomputed"]["loss"], rel=5e-3)
    assert here["images only"]["loss"] == pytest.approx(reference["images only"]["loss"], rel=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("name", [case.name for case in CLASSES])
def test_other_classes_train_alike_at_every_layout(results: Any, name: str, layout: tuple[int, int, int]) -> None:
    here, reference = results(layout)[name], results((1, 1, 1))[name]
    assert here["loss"] == pytest.approx(reference["loss"], rel=1e-6)
    assert here["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)


def test_resumed_exactly_and_at_another_layout(folders: Path) -> None:
    """DoRA on some layers of two parts, two modules trained in full; the checkpoint holds no more than these."""
    arguments: dict[str, Any] = {"checkpoint": str(folders / "megatron"), "save_dir": str(folders / "resumed")}
    companions = hf_folder(latest_checkpoint(folders / "megatron")[0])
    frozen = str(folders / FROZEN)
    found = run_world(4, adapter_checks.save_and_resume, tp=2, pp=1, hf=str(companions), frozen=frozen, **arguments)[0]
    assert found["resumed"] == found["expected"], "the same layout continues bitwise"
    trained, buffers = found["sizes"]
    assert trained <= buffers < 1.1 * trained, "nothing that is frozen has a gradient"
    saved = latest_checkpoint(folders / "resumed" / "adapter")[0]
    assert {path.name for path in saved.rglob("*.safetensors")} == set()
    check_export(folders / "hf", folders / "resumed" / "adapter", folders)
    check_two_adapters(folders / "hf", folders / "resumed" / "several", folders)
    elsewhere = run_world(2, adapter_checks.resume_elsewhere, tp=1, pp=2, **arguments)[0]
    assert elsewhere == pytest.approx(found["expected"], rel=1e-5)


def test_padded_layers_are_divided(tmp_path: Path) -> None:
    """On Qwen2.5-VL's tower, where the second of two ranks has nothing but padding in the MLPs."""
    case = next(case for case in EACH_CLASS if case.architecture == "qwen2_5_vl")
    hf = tmp_path / "hf"
    make_case(case, hf)
    import_hf(hf, tmp_path / "megatron")
    layers = list(model_layers(load_hf_config(hf)).members)
    for name, options in (("lora", {}), ("dora", {"use_dora": True})):
        make_peft_folder(hf, tmp_path / name, r=3, lora_alpha=5, target_modules=layers, **options)
    inputs = case_inputs(case, open_hf(hf), hf)
    folders = {name: str(tmp_path / name) for name in ("lora", "dora")}
    companions = str(hf_folder(latest_checkpoint(tmp_path / "megatron")[0]))
    given = {"checkpoint": str(tmp_path / "megatron"), "save_dir": str(tmp_path / "runs"), "hf": companions}
    found = run_world(2, adapter_checks.load_and_save, tp=2, pp=1, adapters=folders, inputs=inputs, **given)
    for name in folders:
        model = open_peft(hf, {"default": tmp_path / name})
        with torch.no_grad():
            expected = model(**hf_inputs(model, inputs)).logits
        assert (found[0][name] - expected).abs().max() <= 1e-5 * expected.abs().max()
        export_hf(tmp_path / "runs" / name, tmp_path / f"{name}-again")
        before, after = (load_file(tmp_path / x / "adapter_model.safetensors") for x in (name, f"{name}-again"))
        assert before.keys() == after.keys() and all(torch.equal(x, after[key]) for key, x in before.items())


def check_export(hf: Path, run: Path, folder: Path) -> None:
    """PEFT opens the exported adapter without a missing key and computes our logits; merges are equal, bit for bit."""
    export_hf(run, folder / "peft", verify=True)
    with (
        patch.object(Base, "is_import", False),
        pytest.raises(ConversionError, match=r"name the folder with --base-model"),
    ):
        export_hf(run, folder / "of-trained-weights")
    export_hf(run, folder / "merged", merge=True, verify=True)
    model = open_peft(hf, {"default": folder / "peft"})
    inputs = make_inputs(open_hf(hf))
    expected, found = hf_logits(model, inputs), logits_of(run, inputs)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (hf_logits(open_hf(hf), inputs) - expected).abs().max() > 0.1, "the adapter matters"
    check_merge(model, folder / "merged")


def check_two_adapters(hf: Path, run: Path, folder: Path) -> None:
    """The trained adapter and the frozen one are exported apart, work together, and are merged together."""
    export_hf(run, folder / "first")
    export_hf(run, folder / "second", adapter=FROZEN)
    export_hf(run, folder / "both", merge=True)
    written, given = (load_file(folder / name / "adapter_model.safetensors") for name in ("second", FROZEN))
    assert written.keys() == given.keys() and all(torch.equal(written[name], given[name]) for name in given)
    model = open_peft(hf, {"default": folder / "first", FROZEN: folder / "second"})
    inputs = make_inputs(open_hf(hf))
    expected = hf_logits(model, inputs)
    assert (logits_of(run, inputs) - expected).abs().max() <= 1e-5 * expected.abs().max()
    check_merge(model, folder / "both")


def check_merge(model: Any, folder: Path) -> None:
    theirs, ours = model.merge_and_unload().state_dict(), open_hf(folder).state_dict()
    assert theirs.keys() == ours.keys() and all(torch.equal(x, ours[name]) for name, x in theirs.items())


def logits_of(run: Path, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    found = forward(load_model(run), inputs)
    assert found is not None
    return found
