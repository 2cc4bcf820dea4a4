"""Safetensors files whose tensors are written one by one, in any order and by several processes.

Names, dtypes and shapes determine the header and every offset. Tensors are in the order of safetensors' own
`save_file`, so that the same tensors give the same file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from llava_mcore.files.direct_writer import Writer
from llava_mcore.files.tensor_bytes import TensorAt, as_bytes

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
"""safetensors' names of dtypes, in safetensors' order."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = {dtype: i for i, dtype in enumerate(DTYPES.values())}
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class PlannedFile:
    """The bytes of the header, the offset of each tensor, and the file's size in bytes."""

    path: Path
    header: bytes
    tensors: dict[str, TensorAt]
    size: int

    def moved_to(self, path: Path) -> PlannedFile:
        """Return the same plan for another path."""
        tensors = {name: replace(at, path=path) for name, at in self.tensors.items()}
        return replace(self, path=path, tensors=tensors)

    def create(self) -> None:
        """Create the file with its header and full size, without the tensors.

        Raises:
            OSError: for example, the disk is full.
        """
        with self.path.open("xb") as file:
            file.write(self.header)
            file.truncate(self.size)


def plan_file(path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> PlannedFile:
    """Plan one file. `tensors`: dtype and shape of each name."""
    order = sorted(tensors, key=lambda name: (-_ORDER[tensors[name][0]], name))
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ends: dict[str, int] = {}
    end = 0
    for name in order:
        dtype, shape = tensors[name]
        start, end = end, end + math.prod(shape) * dtype.itemsize
        ends[name] = start
        content[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    placed = {name: TensorAt(path, len(header) + ends[name], *tensors[name]) for name in order}
    return PlannedFile(path, header, placed, len(header) + end)


def read_offsets(path: Path) -> dict[str, int]:
    """Return the byte offset of each tensor of a safetensors file that has been checked before."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        content = json.loads(file.read(length))
    first = _LENGTH_BYTES + length
    return {name: first + x["data_offsets"][0] for name, x in content.items() if name != "__metadata__"}


def write_tensors(plan: PlannedFile, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a whole file, one tensor after the other.

    Raises:
        OSError: for example, the disk is full.
    """
    plan.create()
    with Writer() as writer:
        for name, tensor in tensors:
            writer.write(plan.path, plan.tensors[name].offset, as_bytes(tensor))
