"""Hugging Face tensors → one file of a Megatron checkpoint (torch_dist), entry by entry. Runs in worker threads."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llava_mcore.checkpoint.checksums import Checksum
from llava_mcore.files.tensor_bytes import HASHERS, Data, TensorAt, Writer, as_bytes, is_finite, sha256
from llava_mcore.weights.slices import Scratch, Shape, TensorSlice, byte_ranges_of, read_slice
from llava_mcore.weights.table import Entry

_CHECKSUMS = threading.Lock()  # torch.save's setting is shared by all threads
_ALIGNMENT = 64  # bytes; allows an export to map the values in the file


@dataclass(frozen=True)
class TensorChunk:
    """One chunk of the stored tensor `key`: at `offset`, of `shape`; `tensor_slice`: of the parameter."""

    key: str
    offset: Shape
    shape: Shape
    tensor_slice: TensorSlice


@dataclass(frozen=True)
class EntryWrite:
    """One parameter: its Hugging Face tensors, its dtype and full shape, and the pieces to store."""

    entry: Entry
    sources: tuple[TensorAt, ...]
    dtype: torch.dtype
    shape: Shape
    pieces: tuple[TensorChunk, ...]

    @property
    def num_bytes(self) -> int:
        return TensorSlice.full(self.shape).numel * self.dtype.itemsize

    @property
    def located(self) -> dict[str, TensorAt]:
        """Each Hugging Face tensor and where it is."""
        return dict(zip(self.entry.hf_names, self.sources, strict=True))

    @property
    def is_cast(self) -> bool:
        return any(at.dtype != self.dtype for at in self.sources)


@dataclass(frozen=True)
class FileWrite:
    """The entries of one file."""

    path: Path
    entries: tuple[EntryWrite, ...]

    @property
    def num_bytes(self) -> int:
        return sum(x.num_bytes for x in self.entries)


@dataclass(frozen=True)
class FileWritten:
    """Start and length in bytes of each piece (key, offset) in `path`; SHA-256 of each HF tensor.

    `checksum`: checksum of the file. `not_finite`: HF tensors with NaN or infinite values.
    """

    path: Path
    pieces: dict[tuple[str, Shape], tuple[int, int]]
    digests: dict[str, str]
    num_bytes: int
    checksum: str
    not_finite: tuple[str, ...]

    @property
    def paths(self) -> frozenset[Path]:
        """Files that have to be synced."""
        return frozenset([self.path])


def write_file(job: FileWrite) -> FileWritten:
    """Write one file and hash its tensors in parallel; those of one entry are in memory at a time.

    Raises:
        OSError: the disk is full, or the like.
    """
    job.path.touch(exist_ok=False)
    with ThreadPoolExecutor(HASHERS) as hashers, Writer() as writer:
        content = _FileContent(job, hashers)
        checksum = Checksum()
        writer.write(job.path, 0, _summed(content, checksum))
        digests = {name: future.result() for name, future in content.hashing.items()}
        not_finite = tuple(name for name, future in content.looking.items() if not future.result())
    return FileWritten(job.path, content.written, digests, job.num_bytes, checksum.text(), not_finite)


def _summed(parts: Iterable[Tensor], checksum: Checksum) -> Iterator[Tensor]:
    """Yield bytes, and compute their checksum while they are in memory."""
    for part in parts:
        checksum.update(part.numpy().data)
        yield part


class _FileContent:
    """A file's bytes in order. Records the offset of each piece, and starts hashing each tensor when it is reached."""

    def __init__(self, job: FileWrite, hashers: ThreadPoolExecutor) -> None:
        self.written: dict[tuple[str, Shape], tuple[int, int]] = {}
        self.hashing: dict[str, Future[str]] = {}
        self.looking: dict[str, Future[bool]] = {}
        self._job, self._hashers = job, hashers

    def __iter__(self) -> Iterator[Tensor]:
        scratch = Scratch()
        position = 0
        for entry in self._job.entries:
            tensors = {name: at.map().to(entry.dtype) for name, at in entry.located.items()}
            to_hash: Mapping[str, Data] = tensors if entry.is_cast else {n: (at,) for n, at in entry.located.items()}
            hashing = {name: self._hashers.submit(sha256, x) for name, x in to_hash.items()}
            looking = {name: self._hashers.submit(is_finite, x, tensors[name].dtype) for name, x in to_hash.items()}
            for piece, data in _pieces(entry, tensors, scratch):
                gap = -position % _ALIGNMENT
                yield torch.zeros(gap, dtype=torch.uint8)
                begin = position = position + gap
                for part in as_saved(data, piece.shape, entry.dtype):
                    yield part
                    position += len(part)
                self.written[piece.key, piece.offset] = begin, position - begin
            if entry.is_cast:
                wait(hashing.values())
                wait(looking.values())  # freed before the next entry
            self.hashing |= hashing
            self.looking |= looking


def as_saved(data: Data, shape: Shape, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the bytes that torch.save writes for a tensor, with the settings of torch.distributed.checkpoint."""
    before, after = _around(shape, dtype)
    yield before
    yield from as_bytes(data)
    yield after


@functools.cache
def _around(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return what torch.save writes before and after the values."""
    file: Any = _Gap()
    with _CHECKSUMS, without_checksums(), torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype), file)  # its memory is never accessed
    before, after = (torch.from_numpy(np.frombuffer(x, np.uint8)) for x in (file.before, file.after))
    return before, after


class _Gap:
    """A file for torch.save under `skip_data`: stores what comes before and after the skipped values."""

    def __init__(self) -> None:
        self.before, self.after = bytearray(), bytearray()
        self._now = self.before

    def write(self, data: bytes) -> int:
        self._now += data
        return len(data)

    def seek(self, offset: int, whence: int) -> None:
        assert whence == os.SEEK_CUR and self._now is self.before
        self._now = self.after

    def flush(self) -> None:
        pass


def _pieces(entry: EntryWrite, tensors: dict[str, Tensor], scratch: Scratch) -> Iterator[tuple[TensorChunk, Data]]:
    """Yield every piece with its values, valid until the next; the full tensor is only assembled if necessary."""
    slices = entry.entry.hf_slices(entry.shape)
    located: list[tuple[TensorSlice, TensorAt]] = []
    if slices is None:
        parts = [(TensorSlice.full(entry.shape), entry.entry.to_megatron(tensors))]
    else:
        parts = [(part, x.view(part.size)) for part, x in zip(slices, tensors.values(), strict=True)]
        located = [] if entry.is_cast else list(zip(slices, entry.sources, strict=True))
    for piece in entry.pieces:
        data: Data | None = byte_ranges_of(piece.tensor_slice, located, lambda at: at)
        if data is None:
            data, _ = read_slice(piece.tensor_slice, parts, lambda x: x, entry.dtype, scratch)
        yield piece, data


@contextlib.contextmanager
def without_checksums() -> Iterator[None]:
    """Make torch.save skip the zip format's CRC-32, which torch.load never checks; in all threads."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
