"""Saves a model with dist_checkpointing; each tensor is only read when it is written.

megatron-core gets tensors without data, plans the checkpoint and creates its metadata as usual. Only the bytes are
written here: worker threads fill one file after the other from the Hugging Face tensors.
"""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import contextlib
import functools
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from llava_mcore.checkpoint.checksums import Checksum
from llava_mcore.checkpoint.dist import CHECKPOINT_VERSION
from llava_mcore.compat.megatron.checkpoints import by_sharded_key
from llava_mcore.compat.torch import storage_info
from llava_mcore.convert.io.parameters import EntryWrite, TensorChunk
from llava_mcore.convert.jobs import run_with_progress
from llava_mcore.files.tensor_bytes import HASHERS, Data, TensorAt, Writer, as_bytes, is_finite, sha256
from llava_mcore.weights.slices import Scratch, Shape, TensorSlice, byte_ranges_of, read_slice

FILE_BYTES = 512 << 20
"""Size in bytes at which a file is closed; so files do not depend on the number of workers."""
_CHECKSUMS = threading.Lock()  # torch.save's setting is shared by all threads
_ALIGNMENT = 64  # bytes; allows an export to map the values in the file


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


@dataclass(frozen=True)
class Streamed:
    """SHA-256 of each Hugging Face tensor, and the checksums of the files, by name.

    `not_finite`: tensors with NaN or infinite values.
    """

    digests: dict[str, str] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    not_finite: list[str] = field(default_factory=list)


def save_streamed(state: ShardedStateDict, entries: Sequence[EntryWrite], folder: Path, *, workers: int) -> Streamed:
    """Write one checkpoint folder. Process groups of one must exist.

    Args:
        state: sharded tensors without data, and everything else to store in the checkpoint.
        entries: the contents of the tensors.
        workers: number of threads that write files.

    Raises:
        OSError: the disk is full, or the like.
    """
    strategy = _StreamedSave(entries, workers)
    dist_checkpointing.save(
        {"checkpoint_version": CHECKPOINT_VERSION, **state},
        str(folder),
        sharded_strategy=strategy,
        content_metadata={"llava_mcore": 1},
    )
    return strategy.streamed


class _StreamedSave(TorchDistSaveShardedStrategy):
    def __init__(self, entries: Sequence[EntryWrite], workers: int) -> None:
        super().__init__()
        self.entries, self.workers = entries, workers
        self.streamed = Streamed()

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> None:
        """Do the same as torch.distributed.checkpoint.save on one rank, but write the tensors here."""
        folder = Path(checkpoint_dir)
        by_key = by_sharded_key(sharded_state_dict, keep_only_main_replica=self.keep_only_main_replica)
        planner = MCoreSavePlanner(
            dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
        )
        planner.set_up_planner(mcore_to_pyt_state_dict(by_key, False), is_coordinator=True)
        plans, metadata = planner.create_global_plan([planner.create_local_plan()])
        writer = FileSystemWriter(folder)
        writer.set_up_storage_writer(is_coordinator=True)
        objects = self._write_objects(planner, plans[0], folder / "__0_0.distcp")
        writer.finish(metadata, [objects, self._write_tensors(plans[0], folder)])

    def _write_objects(self, planner: MCoreSavePlanner, plan: SavePlan, path: Path) -> list[WriteResult]:
        results = []
        with path.open("xb") as file:
            for item in plan.items:
                if item.type == WriteItemType.BYTE_IO:
                    data: Any = planner.resolve_data(item)
                    start, length = file.tell(), file.write(data.getbuffer())
                    results.append(_result(item, path, start, length))
            file.flush()
            os.fsync(file.fileno())
        return results

    def _write_tensors(self, plan: SavePlan, folder: Path) -> list[WriteResult]:
        items = {
            (item.index.fqn, tuple(item.index.offset)): item
            for item in plan.items
            if item.type != WriteItemType.BYTE_IO and item.index.offset is not None
        }
        results = []
        jobs = list(_files(self.entries, folder))
        for written in run_with_progress("import", write_file, jobs, workers=self.workers):
            self.streamed.digests.update(written.digests)
            self.streamed.not_finite.extend(written.not_finite)
            self.streamed.checksums[written.path.name] = written.checksum
            results += [
                _result(items.pop(key), written.path, start, length) for key, (start, length) in written.pieces.items()
            ]
        assert not items, f"megatron-core planned tensors that were not written: {sorted(items)}"
        return results


def _result(item: WriteItem, path: Path, start: int, length: int) -> WriteResult:
    return WriteResult(index=item.index, size_in_bytes=length, storage_data=storage_info(path.name, start, length))


def _files(entries: Iterable[EntryWrite], folder: Path) -> Iterator[FileWrite]:
    """Distribute the entries over files, in order."""
    waiting: list[EntryWrite] = []
    index, num_bytes = 1, 0
    for entry in entries:
        waiting.append(entry)
        num_bytes += entry.num_bytes
        if num_bytes >= FILE_BYTES:
            yield FileWrite(folder / f"__0_{index}.distcp", tuple(waiting))
            waiting, index, num_bytes = [], index + 1, 0
    if waiting:
        yield FileWrite(folder / f"__0_{index}.distcp", tuple(waiting))


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
