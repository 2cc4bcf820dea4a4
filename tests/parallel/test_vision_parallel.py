"""Towers that every tensor-parallel rank has whole, for a part of the images: nothing of a step changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llava_mcore.convert.check import check_folder
from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.data.samples import Conversation, Turn
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.model_table import mapping_table, usual_names
from tests.helpers.tiny_audio import make_hf_audio
from tests.helpers.tiny_classes import MAKERS
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.tiny_idefics2 import make_hf_idefics2
from tests.helpers.tiny_qwen import make_hf_qwen
from tests.helpers.world import run_world
from tests.parallel import vision_parallel_checks
from tests.parallel.test_layouts import assert_same_folder
from tests.unit.models.test_audio import conversation
from tests.unit.models.test_idefics2 import CONVERSATIONS as OF_IDEFICS
from tests.unit.models.test_qwen import CONVERSATIONS as OF_QWEN
from tests.unit.models.test_qwen import PICTURES

SAID = Turn("assistant", "It is seven.")
OF_PICTURES = [
    Conversation((Turn("user", "<image>\nWhat? <image> <image>"), SAID), tuple(PICTURES)),
    Conversation((Turn("user", "Is it even?"), SAID), ()),
    Conversation((Turn("user", "<image>\nthis?"), SAID), (PICTURES[1],)),
]
OF_AUDIO = [conversation("<audio> <audio>", 0.3, 2.0), conversation("Is it even?"), conversation("<audio>", 1.005)]
SIGLIP: dict[str, Any] = {"vision": "siglip", "text": "qwen2"}
UNDIVIDED = {"intermediate_size": 51, "num_heads": 1}
"""A head that does not divide by two, and an MLP that is padded."""


@dataclass(frozen=True)
class TinyModel:
    """How a class's folder is made, and three conversations, the second without images."""

    make: Callable[[Path], object]
    conversations: list[Conversation]


CLASSES = {
    "llava": TinyModel(make_hf_llava, OF_PICTURES),
    "llava_next": TinyModel(partial(make_hf_llava, architecture="llava_next"), OF_PICTURES),
    "llava_onevision": TinyModel(partial(make_hf_llava, architecture="llava_onevision", **SIGLIP), OF_PICTURES),
    **{name: TinyModel(make, OF_PICTURES) for name, make in MAKERS.items()},
    "qwen2_vl": TinyModel(partial(make_hf_qwen, name="qwen2_vl"), OF_QWEN),
    "qwen2_5_vl": TinyModel(partial(make_hf_qwen, name="qwen2_5_vl", vision_overrides=UNDIVIDED), OF_QWEN),
    "qwen3_vl": TinyModel(partial(make_hf_qwen, name="qwen3_vl", vision_overrides={"num_heads": 1}), OF_QWEN),
    "idefics2": TinyModel(make_hf_idefics2, OF_IDEFICS),
    "audio": TinyModel(partial(make_hf_audio, seconds=4), OF_AUDIO),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("vision")
    found = {}
    for name, model in CLASSES.items():
        model.make(root / name)
        import_hf(root / name, root / f"{name}-megatron")
        found[name] = {
            "hf": str(root / name),
            "checkpoint": str(root / f"{name}-megatron"),
            "all": model.conversations,
            "single": model.conversations[2:],
            "text": model.conversations[1:2],
        }
    return found


def test_losses_and_gradients_are_those_of_one_rank(cases: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    arguments = {"cases": cases, "save_dir": str(tmp_path)}
    (one,) = run_world(1, vision_parallel_checks.gradients, tp=1, pp=1, **arguments)
    two = run_world(2, vision_parallel_checks.gradients, tp=2, pp=1, **arguments)
    for (name, variant), expected in one.items():
        for rank in (0, 1):
            found, where = two[rank][name, variant], (name, variant, rank)
            losses, norm = torch.tensor(expected["losses"]), expected["norm"]
            assert torch.allclose(torch.tensor(found["losses"]), losses, rtol=1e-5, atol=0.0), where
            assert norm > 0 and found["norm"] == pytest.approx(norm, rel=1e-5), where
            assert_same_gradients(cases[name], expected["gradients"], found["gradients"], where)


def assert_same_gradients(
    case: dict[str, Any], whole: dict[str, Tensor], found: dict[str, Tensor], where: tuple[str, str, int]
) -> None:
    """Compare each gradient with all of one rank's, of the tower, or with the part that this rank has."""
    hf = load_hf_config(Path(case["hf"]))
    entries = mapping_table(hf, usual_names(hf), hf_tensors={}, padded_vocab_size=512).entries
    assert found.keys() == whole.keys()
    for name, gradient in whole.items():
        is_whole = name.startswith("vision_model.")
        mine = gradient if is_whole else entries[name].shard.split(gradient, 2)[where[-1]]
        assert found[name].shape == mine.shape, (where, name)
        assert (found[name] - mine).abs().max() <= 1e-5 * gradient.abs().max() + 1e-9, (where, name)


@pytest.mark.long
def test_steps_are_those_of_one_rank(cases: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """With two pipeline stages, and with two replicas of the model."""
    others = {name: cases[name] for name in ("qwen2_5_vl", "qwen3_vl", "audio")}
    arguments: dict[str, Any] = {"llava": cases["llava"]["checkpoint"], "save_dir": str(tmp_path)}
    (one,) = run_world(1, vision_parallel_checks.curves, tp=1, pp=1, cases=others, **arguments)
    for pp, chosen in ((2, others), (1, {})):
        ranks = run_world(4, vision_parallel_checks.curves, tp=2, pp=pp, cases=chosen, **arguments)
        assert all(rank == ranks[0] for rank in ranks), "ranks disagree about the loss"
        assert ranks[0].keys() == one.keys() - (others.keys() - chosen.keys())
        for run, found in ranks[0].items():
            loss, norm = (1e-2, 5e-2) if run == "bf16" else (1e-5, 1e-3)
            assert found["loss"] == pytest.approx(one[run]["loss"], rel=loss), run
            assert found["grad_norm"] == pytest.approx(one[run]["grad_norm"], rel=norm), run
            assert found["loss"][-1] < found["loss"][0], run


def test_checkpoints_load_with_and_without_the_option(cases: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    arguments = {"checkpoint": cases["llava"]["checkpoint"], "save_dir": str(tmp_path)}
    ranks = run_world(2, vision_parallel_checks.switch, tp=2, pp=1, **arguments)
    assert ranks[0] == ranks[1] and len(ranks[0]) == 4
    for name, (resumed, uninterrupted) in ranks[0].items():
        assert resumed == pytest.approx(uninterrupted, rel=1e-5), name


def test_an_import_is_exported_bit_for_bit(cases: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    chosen = {name: cases[name]["checkpoint"] for name in ("qwen2_5_vl", "llava_onevision", "audio")}
    chosen["qwen2_5_vl"] = str(tmp_path / "import")  # for as many ranks as train
    import_hf(Path(cases["qwen2_5_vl"]["hf"]), tmp_path / "import", tensor_parallel=2, verify=True)
    summary = check_folder(Path(cases["qwen2_5_vl"]["hf"]), tp=2, pp=1)
    assert summary.endswith("fits tp 2 x pp 1 with --vision-data-parallel")
    run_world(2, vision_parallel_checks.save_unchanged, tp=2, pp=1, checkpoints=chosen, save_dir=str(tmp_path))
    for name in chosen:
        export_hf(tmp_path / name, tmp_path / f"{name}-hf", tensor_parallel=2, pipeline_parallel=1, verify=True)
        assert_same_folder(Path(cases[name]["hf"]), tmp_path / f"{name}-hf")


def test_ranks_draw_other_dropout_for_their_pictures_and_stay_together(
    cases: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """A rank draws in the tower for its own images alone, which must not move the numbers that all ranks share."""
    arguments = {"case": cases["qwen2_5_vl"], "save_dir": str(tmp_path)}
    first, second = run_world(2, vision_parallel_checks.with_dropout, tp=2, pp=1, **arguments)
    assert torch.equal(first["random"], second["random"])
    assert any(name.startswith("vision_model.") for name in first["alike"])
    assert all(torch.equal(x, second["alike"][name]) for name, x in first["alike"].items())
