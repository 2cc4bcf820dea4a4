"""torch's files across its versions (2.11 to 2.15), and its private names for what is in them."""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import TensorProperties

from llava_mcore.compat.required import replace_name, required

NUM_STATE = 5
"""Values of a pickled TensorProperties up to torch 2.14; 2.15 adds `strides`, which only ever describes a tensor."""


@functools.cache
def accept_newer_metadata() -> None:
    """Let this torch read the metadata of checkpoints that torch 2.15 wrote."""
    if any(field.name == "strides" for field in fields(TensorProperties)):
        return
    set_state = required(TensorProperties, "__setstate__")

    def set_known_state(self: TensorProperties, state: tuple[Any, ...]) -> None:
        set_state(self, state[:NUM_STATE])

    replace_name(TensorProperties, "__setstate__", set_known_state)


def file_offset(tensor: Tensor) -> int:
    """Return at which byte of its file a tensor begins that torch.load has put on the meta device; a contiguous one."""
    return int(required(tensor.untyped_storage(), "_checkpoint_offset") + tensor.storage_offset() * tensor.itemsize)


def place_in_file(name: str, start: int, length: int) -> Any:
    """Return what `.metadata` says of where a tensor lies: in which file, from which byte, how many."""
    return required(filesystem, "_StorageInfo")(name, start, length)
