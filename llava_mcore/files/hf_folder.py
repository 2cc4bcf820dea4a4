"""Weights in a Hugging Face folder: reads headers first, then one memory-mapped tensor at a time."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from llava_mcore.errors import ConversionError, problems
from llava_mcore.files.atomic import sync, sync_tree
from llava_mcore.files.folder_lock import FolderLock
from llava_mcore.files.regular import require_regular
from llava_mcore.files.safetensors_writer import DTYPES, read_offsets
from llava_mcore.files.tensor_bytes import TensorAt
from llava_mcore.files.weight_files import INDEX, choose_weight_files, require_weight_files

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


def partial_sibling(target: Path) -> Path:
    """Return an empty folder next to `target` to write into; `publish` renames it."""
    partial = target.parent / f".{target.name}.partial"
    if partial.exists():
        shutil.rmtree(partial)  # left by an interrupted run; nothing else uses this name
    partial.mkdir(parents=True)
    return partial


def publish(partial: Path, target: Path) -> None:
    """Rename a finished folder to its final path, so that a partial one is never taken for complete."""
    sync_tree(partial)
    if target.exists():
        target.rmdir()  # an empty folder: `require_absent` has been called
    os.rename(partial, target)
    sync(target.parent)


def locked(target: Path, *, activity: str) -> FolderLock:
    """Return the lock for writing to `target`: two writers would delete each other's files."""
    path = target.parent / f".{target.name}.lock"
    return FolderLock(
        path, activity=f"{activity} to {target}", advice="wait for it or stop it, or choose another folder"
    )


@contextlib.contextmanager
def written_beside(target: Path, *, num_bytes: int, activity: str) -> Iterator[Path]:
    """Yield an empty folder to write into, which becomes `target` at the end and is removed after an error.

    Args:
        num_bytes: bytes that will be written.
        activity: "the import", for messages.

    Raises:
        ConversionError: before anything is written, if the disk has not enough space or refuses the folder; or if
            writing failed.
        FolderInUse: another process is writing to the target.
    """
    require_room(target, num_bytes, activity=activity)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(target, activity=activity))
            partial = partial_sibling(target)
        except OSError as error:
            raise ConversionError(f"{activity} cannot be written to {target}: {error}") from error
        stack.enter_context(_published(partial, target, num_bytes, activity))
        yield partial


@contextlib.contextmanager
def _published(partial: Path, target: Path, num_bytes: int, activity: str) -> Iterator[None]:
    """Rename `partial` to `target` at the end; remove it after an error."""
    try:
        yield
        publish(partial, target)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = f"; it needs {num_bytes / 1e9:.2f} GB, free some or choose another folder" if full else ""
        raise ConversionError(f"{activity} to {target} failed, and its files were removed: {error}{hint}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def require_room(target: Path, num_bytes: int, *, activity: str) -> None:
    """Refuse to start if the disk has not enough space.

    Raises:
        ConversionError: with the needed and the free space.
    """
    existing = next(p for p in (target.absolute(), *target.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        needed = f"{num_bytes / 1e9:.2f} GB, but {free / 1e9:.2f} GB are free"
        raise ConversionError(f"{target}: {activity} needs {needed} there; free some or choose another folder")


def require_absent(target: Path, *, activity: str) -> None:
    """Refuse to overwrite anything.

    Raises:
        ConversionError: `target` exists and is not an empty folder.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConversionError(f"{target} exists and is not empty; {activity} never overwrites: choose another folder")
