"""Weights in a Hugging Face folder: safetensors files, read and written one tensor at a time.

Headers are read first, then one memory-mapped tensor at a time. A new file is planned from names, dtypes and shapes,
which determine its header and every offset: several threads can then write its tensors in any order. Tensors are in the
order of safetensors' own `save_file`, so that the same tensors give the same file.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from llava_mcore.errors import ConversionError, problems
from llava_mcore.files.hf_files import INDEX, choose_weight_files, read_config, require_weight_files
from llava_mcore.files.regular import require_regular
from llava_mcore.files.tensor_bytes import TensorAt, Writer, as_bytes

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


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a folder, from the header alone. `dtype` is safetensors' name."""

    file: str
    dtype: str
    shape: tuple[int, ...]


class HfFolder:
    """Lazy reader of a folder's safetensors files."""

    def __init__(self, path: Path, tensors: dict[str, TensorInfo], ignored: tuple[str, ...] = ()) -> None:
        self.path, self.tensors, self._ignored = path, tensors, ignored
        self._offsets: dict[str, dict[str, int]] = {}

    @classmethod
    def open(cls, path: Path) -> HfFolder:
        """Read the headers of the files that transformers would read.

        Raises:
            ConversionError: there are no safetensors, it is ambiguous which are meant, or files of the index are
                missing, damaged or lack a tensor.
        """
        chosen = choose_weight_files(path)
        tensors: dict[str, TensorInfo] = {}
        wrong: list[str] = []
        for file in chosen.files:
            try:
                header = _read_header(path, file)
            except (OSError, SafetensorError) as error:
                wrong.append(f"{file}: {error}")
                continue
            wrong += [f"{name}: in {tensors[name].file} and in {file}" for name in header.keys() & tensors.keys()]
            tensors |= header
        wrong += [f"{name}: in {INDEX}, but not in {file}" for name, file in chosen.index.items()
                  if name not in tensors and (path / file).is_file()]  # fmt: skip
        wrong += [f"{name}: dtype {x.dtype} is not supported" for name, x in tensors.items() if x.dtype not in DTYPES]
        if wrong:
            hint = "expected model.safetensors or model.safetensors.index.json and its files (no .bin weights)"
            raise ConversionError(problems(f"{path}: the weights cannot be read; {hint}", wrong))
        return cls(path, tensors, chosen.ignored)

    def warn_of_ignored(self) -> None:
        """Warn of other weight files in the folder, which the user may have meant."""
        if self._ignored:
            read = ", ".join(sorted({x.file for x in self.tensors.values()})[:3])
            logger.warning(
                "warning: %s: the weights are read from %s, as transformers does; not from %s: delete what is not "
                "used, other programs may read it",
                self.path,
                read,
                ", ".join(self._ignored[:10]),
            )

    @classmethod
    def of_file(cls, path: Path) -> HfFolder:
        """Read the header of one file and ignore others in the folder.

        Raises:
            ConversionError: not a readable safetensors file.
        """
        try:
            return cls(path.parent, _read_header(path.parent, path.name))
        except (OSError, SafetensorError) as error:
            raise ConversionError(f"{path} cannot be read: {error}") from error

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: info.shape for name, info in self.tensors.items()}

    def where(self, name: str) -> TensorAt:
        """Return where one tensor's bytes are."""
        info = self.tensors[name]
        if info.file not in self._offsets:
            self._offsets[info.file] = read_offsets(self.path / info.file)
        return TensorAt(self.path / info.file, self._offsets[info.file][name], DTYPES[info.dtype], info.shape)

    def get(self, name: str) -> Tensor:
        """Return one tensor, memory-mapped."""
        return self.where(name).map()

    def record(self) -> dict[str, Any]:
        """Return the JSON record from which the same files can be written again."""
        return to_record(self.tensors)


def _read_header(folder: Path, file: str) -> dict[str, TensorInfo]:
    require_regular(folder / file, ConversionError)
    with safe_open(folder / file, framework="pt") as handle:
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118  (not a dict)
        return {name: TensorInfo(file, x.get_dtype(), tuple(x.get_shape())) for name, x in slices.items()}


def to_record(tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Return names, files, dtypes and shapes as JSON."""
    return {name: asdict(info) for name, info in tensors.items()}


def infos_from_record(record: Mapping[str, Any], source: Path) -> dict[str, TensorInfo]:
    """Inverse of `to_record`.

    Raises:
        ConversionError: the record is not valid. An export writes the files that it names.
    """
    try:
        infos = {name: TensorInfo(x["file"], x["dtype"], tuple(map(int, x["shape"]))) for name, x in record.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise ConversionError(f"{source}: not a valid list of tensors ({error!r})") from error
    require_weight_files({x.file for x in infos.values()}, source)
    unknown = sorted({str(x.dtype) for x in infos.values() if x.dtype not in DTYPES})
    if unknown:
        raise ConversionError(f"{source}: unknown dtypes: {', '.join(unknown)}")
    return infos


def require_source(folder: Path) -> None:
    """Refuse a folder without a readable config.json or readable weights, from headers alone.

    Raises:
        ConversionError: what is missing or damaged.
    """
    read_config(folder)
    HfFolder.open(folder)
