"""Hugging Face tensors → one file of a Megatron checkpoint (torch_dist), entry by entry. Runs in worker threads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from llava_mcore.checkpoint.raw import HASHERS, Data, TensorAt, Writer, sha256
from llava_mcore.checkpoint.runs import runs_of
from llava_mcore.conversion.boxes import Box, Scratch, Shape, read_box
from llava_mcore.conversion.mapping import Entry

_ALIGNMENT = 64  # bytes; lets an export use the numbers where they lie


@dataclass(frozen=True)
class Piece:
    """One chunk of the stored tensor `key`: at `offset`, of `shape`; `box` says which part of the parameter it is."""

    key: str
    offset: Shape
    shape: Shape
    box: Box


@dataclass(frozen=True)
class EntryWrite:
    """One parameter: its Hugging Face tensors, the dtype and full shape it gets, and the pieces that are stored."""

    entry: Entry
    sources: tuple[TensorAt, ...]
    dtype: torch.dtype
    shape: Shape
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        return Box.whole(self.shape).numel * self.dtype.itemsize

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
    """Where in `path` each piece (key, offset) begins and how long it is, in bytes; SHA-256 of each HF tensor."""

    path: Path
    pieces: dict[tuple[str, Shape], tuple[int, int]]
    digests: dict[str, str]
    num_bytes: int

    @property
    def paths(self) -> frozenset[Path]:
        """What is to be synced."""
        return frozenset([self.path])


def write_file(job: FileWrite) -> FileWritten:
    """Write one file, while its tensors are hashed beside it; those of one entry are in memory at a time.

    Raises:
        OSError: the disk is full, or the like.
    """
    written: dict[tuple[str, Shape], tuple[int, int]] = {}
    hashing: dict[str, Future[str]] = {}
    scratch = Scratch()
    with (
        job.path.open("xb") as file,
        ThreadPoolExecutor(HASHERS) as hashers,
        Writer() as writer,
        torch.serialization.skip_data(),  # torch.save leaves out the numbers, in this thread
    ):
        for entry in job.entries:
            tensors = {name: at.map().to(entry.dtype) for name, at in entry.located.items()}
            to_hash: Mapping[str, Data] = tensors if entry.is_cast else {n: (at,) for n, at in entry.located.items()}
            new = {name: hashers.submit(sha256, x) for name, x in to_hash.items()}
            for piece, data in _cut(entry, tensors, scratch):
                written[piece.key, piece.offset] = _append(file, piece.shape, entry.dtype, data, writer)
            if entry.is_cast:
                wait(new.values())  # it leaves the memory before the next entry comes
            hashing |= new
        digests = {name: future.result() for name, future in hashing.items()}
    return FileWritten(job.path, written, digests, job.num_bytes)


def _cut(entry: EntryWrite, tensors: dict[str, Tensor], scratch: Scratch) -> Iterator[tuple[Piece, Data]]:
    """Yield every piece with its numbers, valid until the next; the full tensor is made only where it must be."""
    boxes = entry.entry.hf_boxes(entry.shape)
    located: list[tuple[Box, TensorAt]] = []
    if boxes is None:
        parts = [(Box.whole(entry.shape), entry.entry.to_megatron(tensors))]
    else:
        parts = list(zip(boxes, tensors.values(), strict=True))
        located = [] if entry.is_cast else list(zip(boxes, entry.sources, strict=True))
    for piece in entry.pieces:
        data: Data | None = runs_of(piece.box, located, lambda at: at)
        if data is None:
            data, _ = read_box(piece.box, parts, lambda x: x, entry.dtype, scratch)
        yield piece, data


class _Container:
    """A file for torch.save under `skip_data`: when it skips a tensor's numbers, `fill` has to write them."""

    def __init__(self, file: BinaryIO, fill: Callable[[int], None]) -> None:
        self.file, self.fill = file, fill
        self.write, self.flush = file.write, file.flush

    def seek(self, offset: int, whence: int) -> None:
        assert whence == os.SEEK_CUR
        self.file.flush()
        self.fill(self.file.tell())
        self.file.seek(offset, whence)


def _append(file: BinaryIO, shape: Shape, dtype: torch.dtype, data: Data, writer: Writer) -> tuple[int, int]:
    """Write one piece as torch.distributed.checkpoint does and return where it begins and its length in bytes."""
    file.write(bytes(-file.tell() % _ALIGNMENT))
    start = file.tell()
    container: Any = _Container(file, lambda position: writer.write(file.fileno(), position, data))
    try:
        torch.save(torch.empty(shape, dtype=dtype), container)  # says what it is; its memory is never touched
    except RuntimeError as error:
        # torch's zip writer, closing, complains about what is missing after a failed write.
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None
    return start, file.tell() - start


@contextlib.contextmanager
def without_checksums() -> Iterator[None]:
    """Let torch.save leave out the zip format's CRC-32, which torch.load never looks at; in all threads."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
