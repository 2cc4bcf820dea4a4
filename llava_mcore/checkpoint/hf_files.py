"""Weights in a Hugging Face folder: headers first, tensors one at a time (memory-mapped safetensors)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from llava_mcore.errors import ConversionError, problems

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a folder, from the header alone. `dtype` in safetensors' spelling."""

    file: str
    dtype: str
    shape: tuple[int, ...]


class HfFolder:
    """Lazy reader of a folder's safetensors files."""

    def __init__(self, path: Path, tensors: dict[str, TensorInfo]) -> None:
        self.path, self.tensors = path, tensors
        self._open: dict[str, Any] = {}

    @classmethod
    def open(cls, path: Path) -> HfFolder:
        """Read the headers.

        Raises:
            ConversionError: no safetensors, a file of the index is missing, damaged or lacks a tensor (all listed).
        """
        index = path / INDEX
        if index.is_file():
            expected = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = sorted(set(expected.values()))
        else:
            expected, files = {}, [SINGLE]
        tensors: dict[str, TensorInfo] = {}
        found: list[str] = []
        for file in files:
            try:
                tensors |= _read_header(path, file)
            except (OSError, SafetensorError) as error:
                found.append(f"{file}: {error}")
        found += [f"{name}: in {INDEX}, but not in {file}" for name, file in expected.items()
                  if name not in tensors and (path / file).is_file()]  # fmt: skip
        if found:
            hint = "expected model.safetensors or model.safetensors.index.json and its files (no .bin weights)"
            raise ConversionError(problems(f"{path}: the weights cannot be read; {hint}", found))
        return cls(path, tensors)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: info.shape for name, info in self.tensors.items()}

    def get(self, name: str) -> Tensor:
        """Read one tensor."""
        file = self.tensors[name].file
        if file not in self._open:
            self._open[file] = safe_open(self.path / file, framework="pt")
        return self._open[file].get_tensor(name)

    def record(self) -> dict[str, Any]:
        """Return what is needed to write the same files again (JSON)."""
        return to_record(self.tensors)


def _read_header(folder: Path, file: str) -> dict[str, TensorInfo]:
    with safe_open(folder / file, framework="pt") as handle:
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118  (not a dict)
        return {name: TensorInfo(file, x.get_dtype(), tuple(x.get_shape())) for name, x in slices.items()}


def to_record(tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Return names, files, dtypes and shapes as JSON."""
    return {name: asdict(info) for name, info in tensors.items()}


def infos_from_record(record: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Inverse of `to_record`."""
    return {name: TensorInfo(x["file"], x["dtype"], tuple(x["shape"])) for name, x in record.items()}


def is_weight_file(path: Path) -> bool:
    """Tell weights (and their index) from config, tokenizer and processor files."""
    suffixes = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".index.json")
    return path.name.endswith(suffixes)


def companion_files(folder: Path) -> list[Path]:
    """Return the files that travel with the weights: config, tokenizer, processor, templates, licences."""
    return sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith(".") and not is_weight_file(p))


def copy_companions(source: Path, target: Path, *, skip: Iterable[str] = ()) -> None:
    """Copy config, tokenizer and processor files, byte for byte."""
    target.mkdir(parents=True, exist_ok=True)
    for path in companion_files(source):
        if path.name not in skip:
            shutil.copyfile(path, target / path.name)


def write_weights(folder: Path, tensors: Mapping[str, Tensor], file: str) -> None:
    """Write one safetensors file."""
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / file, metadata={"format": "pt"})


def write_index(folder: Path, files: Mapping[str, str], total_size: int) -> None:
    """Write the index of a folder with several weight files. `files`: tensor name to file name."""
    content = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(files.items()))}
    (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def partial_sibling(target: Path) -> Path:
    """Return an empty folder beside `target` to write into; `publish` moves it into place."""
    partial = target.parent / f".{target.name}.partial"
    if partial.exists():
        shutil.rmtree(partial)  # left by an interrupted run; nothing else writes this name
    partial.mkdir(parents=True)
    return partial


def publish(partial: Path, target: Path) -> None:
    """Move a finished folder into place, so that a half-written one is never taken for finished."""
    if target.exists():
        target.rmdir()  # only ever an empty one: `require_absent` came first
    os.rename(partial, target)


def require_absent(target: Path, *, what: str) -> None:
    """Refuse to write over anything.

    Raises:
        ConversionError: `target` exists and is not an empty folder.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConversionError(f"{target} exists and is not empty; {what} never overwrites: choose another folder")
