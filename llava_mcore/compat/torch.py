"""Private names of torch 2.11 to 2.15, and differences between the checkpoint files that these versions write."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from llava_mcore.compat.required import replace_name, required

NUM_STATE = 5
"""Values of a pickled TensorProperties up to torch 2.14; 2.15 adds `strides`, which only describes a tensor."""


@functools.cache
def accept_newer_metadata() -> None:
    """Make this torch read the metadata of checkpoints that torch 2.15 wrote."""
    from torch.distributed.checkpoint.metadata import TensorProperties  # its import takes long

    if any(field.name == "strides" for field in fields(TensorProperties)):
        return
    set_state = required(TensorProperties, "__setstate__")

    def set_known_state(self: Any, state: tuple[Any, ...]) -> None:
        set_state(self, state[:NUM_STATE])

    replace_name(TensorProperties, "__setstate__", set_known_state)


def file_offset(tensor: Tensor) -> int:
    """Return the byte offset in its file of a contiguous tensor that torch.load has put on the meta device."""
    return int(required(tensor.untyped_storage(), "_checkpoint_offset") + tensor.storage_offset() * tensor.itemsize)


def storage_info(name: str, start: int, length: int) -> Any:
    """Return the entry of `.metadata` for a tensor's location: file name, first byte, number of bytes."""
    from torch.distributed.checkpoint import filesystem  # its import takes long

    return required(filesystem, "_StorageInfo")(name, start, length)


def assert_on_device(condition: Tensor, message: str) -> None:
    """End the program if a boolean on the device is false, without waiting for it."""
    required(torch, "_assert_async")(condition, message)


def is_view_of(part: Tensor, base: Tensor) -> bool:
    """Return whether a tensor is another one or shows a part of it."""
    return part is base or required(part, "_base") is base


def rebuild_tensor() -> Callable[..., Tensor]:
    """Return the function that pickled tensors name."""
    rebuild: Callable[..., Tensor] = required(torch._utils, "_rebuild_tensor_v2")
    return rebuild


def end_loader_processes(batches: Any) -> None:
    """End the processes of a DataLoader's iterator at once. The garbage collector would wait five seconds for them."""
    required(batches, "_shutdown_workers")()


def times(x: Tensor, factor: Tensor) -> Tensor:
    """Return x times a tensor of one value, with a kernel that reads several values at a time; the kernel for
    broadcasts does not."""
    (result,) = torch._foreach_mul([x], factor)
    return result


def multiply(parts: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiply tensors by one value, in place, with such a kernel."""
    torch._foreach_mul_(list(parts), factor)
