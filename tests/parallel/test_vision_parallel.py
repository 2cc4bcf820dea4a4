"""Towers that every tensor-parallel rank has whole, for a part of the pictures: nothing of a step changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.data.samples import Conversation, Turn
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.table import mapping_table, usual_names
from tests.helpers.tiny_audio import make_hf_audio
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.tiny_idefics2 import make_hf_idefics2
from tests.helpers.tiny_qwen import make_hf_qwen
from tests.helpers.world import run_world
from tests.parallel.test_layouts import assert_same_folder
from tests.unit.test_audio import conversation
from tests.unit.test_idefics2 import CONVERSATIONS as OF_IDEFICS
from tests.unit.test_qwen import CONVERSATIONS as OF_QWEN
from tests.unit.test_qwen import PICTURES

CHECKS = "tests.parallel.vision_parallel_checks:"
SAID = Turn("assistant", "It is seven.")
OF_PICTURES = [
    Conversation((Turn("user", "<image>\nWhat? <image> <image>"), SAID), tuple(PICTURES)),
    Conversation((Turn("user", "Is it even?"), SAID), ()),
    Conversation((Turn("user", "<image>\nthis?"), SAID), (PICTURES[1],)),
]
OF_SOUND = [conversation("<audio> <audio>", 0.3, 2.0), conversation("Is it even?"), conversation("<audio>", 1.005)]
GIVEN = {
    "llava": OF_PICTURES,
    "llava_onevision": OF_PICTURES,
    "qwen2_5_vl": OF_QWEN,
    "qwen3_vl": OF_QWEN,
    "idefics2": OF_IDEFICS,
    "audio": OF_SOUND,
}
"""Of each class three conversations, the second without pictures."""
UNDIVIDED = {"qwen2_5_vl": {"intermediate_size": 51}, "qwen3_vl": {"num_heads": 1}}
"""What does not divide by two."""


def make(name: str, folder: Path) -> None:
    if name == "audio":
        make_hf_audio(folder)
    elif name == "idefics2":
        make_hf_idefics2(folder)
    elif name.startswith("llava"):
        make_hf_llava(folder, architecture=name, **({} if name == "llava" else {"vision": "siglip", "text": "qwen2"}))
    else:
        make_hf_qwen(folder, name, vision_overrides=UNDIVIDED.get(name))


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("vision")
    found = {}
    for name, given in GIVEN.items():
        make(name, root / name)
        import_hf(root / name, root / f"{name}-megatron")
        found[name] = {
            "hf": str(root / name),
            "checkpoint": str(root / f"{name}-megatron"),
            "divides": name not in UNDIVIDED,
            "all": given,
            "single": given[2:],
            "text": given[1:2],
        }
    return found


def test_losses_and_gradients_are_those_of_one_rank(cases: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    arguments = {"cases": cases, "save_dir": str(tmp_path)}
    (one,) = run_world(1, f"{CHECKS}gradients", tp=1, pp=1, **arguments)
    two = run_world(2, f"{CHECKS}gradients", tp=2, pp=1, **arguments)
    for (name, variant, packed), first in two[0].items():
        case, expected = (name, variant, packed), one[name, "", packed]
        assert torch.tensor(first["losses"]).flatten().tolist() == pytest.approx(
            torch.tensor(expected["losses"]).flatten().tolist(), rel=1e-5
        ), case
        for rank in (0, 1):
            found = two[rank][case]
            assert found["norm"] == pytest.approx(expected["norm"], rel=1e-5), case
            assert_same_gradients(cases[name], expected["gradients"], found["gradients"], rank, variant, case)


def assert_same_gradients(
    case: dict[str, Any],
    whole: dict[str, Tensor],
    found: dict[str, Tensor],
    rank: int,
    variant: str,
    where: object,
) -> None:
    """Compare each gradient with this rank's part of that of one rank."""
    hf = load_hf_config(Path(case["hf"]))
    entries = mapping_table(hf, usual_names(hf), hf_tensors=(), padded_vocab_size=512).entries
    assert found.keys() == whole.keys()
    for name, gradient in whole.items():
        is_whole = variant != "divided" and name.startswith("vision_model.")
        mine = gradient if is_whole else entries[name].shard.split(gradient, 2)[rank]
        assert found[name].shape == mine.shape, (where, name)
        assert (found[name] - mine).abs().max() <= 1e-5 * gradient.abs().max() + 1e-7, (where, name)
