"""A tiny model of each class with conversations, imported, and the comparison of their gradients with one rank's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from llava_mcore.data.samples import Conversation, Turn
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.model_table import mapping_table, usual_names
from tests.helpers.tiny_audio import conversation, make_hf_audio
from tests.helpers.tiny_checkpoints import hf_dir, make_checkpoints
from tests.helpers.tiny_classes import MAKERS
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.tiny_idefics2 import make_hf_idefics2
from tests.helpers.tiny_qwen import make_hf_qwen
from tests.unit.models.test_idefics2 import CONVERSATIONS as OF_IDEFICS
from tests.unit.models.test_qwen import CONVERSATIONS as OF_QWEN
from tests.unit.models.test_qwen import PICTURES

Cases = dict[str, dict[str, Any]]
"""By name the folders of a model and its checkpoint, and its conversations: all, one of a single image, one of text."""
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


def make_cases(root: Path, models: Mapping[str, TinyModel]) -> Cases:
    """Make and import these models."""
    checkpoints = make_checkpoints(root, {name: model.make for name, model in models.items()})
    return {
        name: {
            "hf": str(hf_dir(root, name)),
            "checkpoint": checkpoints[name],
            "all": model.conversations,
            "single": model.conversations[2:],
            "text": model.conversations[1:2],
        }
        for name, model in models.items()
    }


def assert_same_gradients(
    case: Mapping[str, Any],
    expected: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    *,
    tp: int,
    tp_rank: int,
    where: object,
    whole_tower: bool,
    has_all: bool = True,
) -> None:
    """Compare the gradients of a rank with those of a single one.

    Args:
        whole_tower: the rank has all of the tower; of all else the part of its tensor-parallel rank.
        has_all: it has something of every parameter, not those of a stage alone.
    """
    hf = load_hf_config(Path(case["hf"]))
    entries = mapping_table(hf, usual_names(hf), hf_tensors={}, padded_vocab_size=512).entries
    assert found and (not has_all or found.keys() == expected.keys())
    for name, gradient in found.items():
        of_one = expected[name]
        is_whole = whole_tower and name.startswith("vision_model.")
        part = of_one if is_whole else entries[name].shard.split(of_one, tp)[tp_rank]
        assert gradient.shape == part.shape, (where, name)
        error = (gradient - part).abs().max()
        assert error <= 1e-5 * of_one.abs().max() + 1e-9, (where, name, error, of_one.abs().max())
