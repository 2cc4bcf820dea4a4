"""A fully sharded run trains as one with the distributed optimizer does, and either continues what the other saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llava_mcore.checkpoint.layout import hf_folder, latest_checkpoint
from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.world import run_world
from tests.parallel import fsdp_checks
from tests.parallel.test_layouts import assert_same_folder
from tests.parallel.validation_checks import make_material

WHOLE = "optim_grads_params"
ROUNDING = {"bf16": 1e-3}
"""How much losses of a variant may differ: gradients of a micro-batch are rounded to bf16 before they are added up."""
LAYOUTS: list[Any] = [
    (2, 1, 1, ["distributed", *fsdp_checks.MODES]),
    (4, 2, 1, [WHOLE, "optim_grads"]),
    (4, 1, 2, [WHOLE, "optim"]),
]
"""Processes, tp, replicas of the shards, kinds of runs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model is."""
    root = tmp_path_factory.mktemp("fsdp")
    make_hf_llava(root / "hf")
    import_hf(root / "hf", root / "megatron")
    make_hf_llava(root / "hf-tied", text="qwen2", tie=True)
    import_hf(root / "hf-tied", root / "tied")
    make_material(root)
    return root


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[Any, Any]:
    """The curves of the distributed optimizer in one process."""
    return curves(folder, 1, 1, 1, ["distributed"])


def curves(folder: Path, size: int, tp: int, replicas: int, kinds: list[str]) -> dict[Any, Any]:
    """Return the curves of a world, of which no rank sees another loss."""
    checkpoints = {"checkpoint": str(folder / "megatron"), "tied": str(folder / "tied"), "data": str(folder / "data")}
    arguments = {"tp": tp, "replicas": replicas, "kinds": kinds, "save_dir": str(folder / "save"), **checkpoints}
    ranks = run_world(size, fsdp_checks.curves, **arguments)
    assert all(rank == ranks[0] for rank in ranks)
    return ranks[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_curves_are_those_of_the_distributed_optimizer(
    folder: Path, expected: dict[Any, Any], layout: tuple[int, int, int, list[str]]
) -> None:
    """Packed and padded, with several micro-batches, frozen towers, adapters, tied embeddings, recomputed layers."""
    found = curves(folder, *layout)
    size, _, replicas, kinds = layout
    assert set(found) == {(x, kind) for kind in kinds for x in fsdp_checks.names_of(kind, size, replicas)}
    for (variant, kind), curve in found.items():
        reference, rel = expected[variant, "distributed"], ROUNDING.get(variant, 1e-5)
        if variant == "validation":
            for name, rows in reference.items():
                assert [x for row in curve[name] for x in row] == pytest.approx(
                    [x for row in rows for x in row], rel=rel
                )
            continue
        assert curve["loss"] == pytest.approx(reference["loss"], rel=rel), (variant, kind)
        assert curve["grad_norm"][0] == pytest.approx(reference["grad_norm"][0], rel=rel), (variant, kind)


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.long)], ids=["full", "lora"])
def test_resumed_by_the_other_kind_and_at_another_layout(folder: Path, tmp_path: Path, lora: bool) -> None:
    """What was loaded is what was saved, bit for bit, whatever shards it was saved in; the losses follow from it."""
    checkpoint = folder / "megatron"
    hf = hf_folder(latest_checkpoint(checkpoint)[0])
    model = {
        "checkpoint": str(checkpoint),
        "hf": str(hf),
        "save_dir": str(tmp_path),
        "more": fsdp_checks.LORA if lora else {},
    }
    # What adapters add to a state is the same in every mode.
    modes = [mode for mode in fsdp_checks.MODES if not (lora and mode == "optim_grads")]
    kinds = ["distributed", *modes]
    expected = run_world(2, fsdp_checks.train_and_save, tp=1, kinds=kinds, **model)[0]
    here = [(WHOLE, WHOLE), (WHOLE, "distributed"), ("optim", WHOLE)]
    here += [] if lora else [(kind, kind) for kind in modes if kind != WHOLE]
    elsewhere = [(WHOLE, WHOLE), ("distributed", "optim_grads")]
    worlds = [(2, 1, 1, here), (4, 2, 1, elsewhere)]
    if not lora:
        worlds.append((4, 1, 2, [(saved, f"{kind}+2") for saved, kind in elsewhere]))
    for size, tp, replicas, pairs in worlds:
        found = run_world(size, fsdp_checks.resume_and_train, tp=tp, replicas=replicas, pairs=pairs, **model)
        for (saved, kind), losses in found[0].items():
            assert losses == pytest.approx(expected[saved], rel=1e-5), (size, tp, saved, kind)
            if size == 2 and tp == 1 and saved == kind:
                assert losses == expected[saved], f"{kind} continues bit for bit at its own layout"
    if not lora:
        exported_alike(tmp_path, [f"{WHOLE}-as-{WHOLE}-tp2-of-4", f"{WHOLE}-as-distributed-tp1-of-2"])


@pytest.mark.parametrize(("axis", "size"), [("ep", 2), ("cp", 4)])
def test_beside_other_axes(folder: Path, tmp_path: Path, axis: str, size: int) -> None:
    """Experts, which other ranks divide than the rest; samples that ranks divide, in two replicas."""
    name = {"ep": "experts", "cp": "megatron"}[axis]
    checkpoint = folder / name
    if axis == "ep":
        make_hf_llava(folder / "hf-experts", text="qwen3_moe")
        import_hf(folder / "hf-experts", checkpoint)
    more = {fsdp_checks.AXES[axis]: 2}
    hf = hf_folder(latest_checkpoint(checkpoint)[0])
    model = {"checkpoint": str(checkpoint), "hf": str(hf), "save_dir": str(tmp_path), "more": more}
    expected = run_world(size, fsdp_checks.train_and_save, tp=1, kinds=["distributed", WHOLE], **model)[0]
    assert expected[WHOLE] == pytest.approx(expected["distributed"], rel=1e-5)
    pairs = [(WHOLE, WHOLE), (WHOLE, "distributed"), ("distributed", "optim_grads")]
    found = run_world(size, fsdp_checks.resume_and_train, tp=1, replicas=1, pairs=pairs, **model)[0]
    for (saved, kind), losses in found.items():
        assert losses == (expected[saved] if saved == kind else pytest.approx(expected[saved], rel=1e-5)), kind


def exported_alike(root: Path, names: list[str]) -> None:
    """Check that runs with the same weights are exported to the same bytes."""
    for name in names:
        export_hf(root / name, root / f"hf-{name}")
    first, *others = (root / f"hf-{name}" for name in names)
    for other in others:
        assert_same_folder(first, other)
