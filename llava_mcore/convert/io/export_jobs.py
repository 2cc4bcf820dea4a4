"""Chunks of a Megatron checkpoint (torch_dist) → Hugging Face tensors, entry by entry. Runs in worker threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llava_mcore.checkpoint.torch_dist_metadata import Chunk
from llava_mcore.convert.jobs import Sized, run_with_progress
from llava_mcore.errors import CheckpointError
from llava_mcore.files.tensor_bytes import HASHERS, Data, TensorAt, Writer, as_bytes, sha256
from llava_mcore.weights.slices import Scratch, Shape, TensorSlice, byte_ranges_of, read_slice
from llava_mcore.weights.table import Entry


@dataclass(frozen=True)
class EntryRead:
    """One parameter: `tensor_slice` of a stored tensor, with its chunks (in the same coordinates).

    `shape` is the parameter's own; a stored tensor may have a leading dim for layers. `dtype`: the dtype to write.
    `targets`: where each Hugging Face tensor goes, a tied copy in its original's list; empty to only read.
    """

    entry: Entry
    shape: Shape
    tensor_slice: TensorSlice
    chunks: tuple[tuple[TensorSlice, Chunk | TensorAt], ...]
    stored_dtype: torch.dtype
    dtype: torch.dtype
    targets: tuple[tuple[TensorAt, ...], ...] = ()

    @property
    def num_bytes(self) -> int:
        return self.tensor_slice.numel * self.dtype.itemsize


@dataclass(frozen=True)
class EntryExport:
    """Some entries, and whether to hash their tensors."""

    entries: tuple[EntryRead, ...]
    hashed: bool

    @property
    def num_bytes(self) -> int:
        return sum(x.num_bytes for x in self.entries)


@dataclass(frozen=True)
class Exported:
    """SHA-256 of each Hugging Face tensor, if requested; `paths`: files that were written to."""

    digests: dict[str, str]
    num_bytes: int
    paths: frozenset[Path] = frozenset()


def hf_tensors(job: EntryRead, scratch: Scratch) -> Iterator[tuple[str, Tensor]]:
    """Yield an entry's Hugging Face tensors, one in memory at a time if the layout allows it.

    Each is valid until the next one.

    Raises:
        CheckpointError: the checkpoint does not contain the whole parameter.
    """
    slices = job.entry.hf_slices(job.shape)
    if slices is None:
        yield from job.entry.to_hf(_read(job, TensorSlice.full(job.shape), scratch)).items()
        return
    for name, tensor_slice, shape in zip(job.entry.hf_names, slices, job.entry.hf_shapes(job.shape), strict=True):
        yield name, _read(job, tensor_slice, scratch).view(shape)


def _hf_data(job: EntryRead, scratch: Scratch) -> Iterator[tuple[str, Data]]:
    """Like `hf_tensors`, but data that can be copied from file to file is not read."""
    slices = job.entry.hf_slices(job.shape)
    if slices is None or job.dtype != job.stored_dtype:
        yield from hf_tensors(job, scratch)
        return
    for name, tensor_slice in zip(job.entry.hf_names, slices, strict=True):
        ranges = byte_ranges_of(_stored_slice(job, tensor_slice), job.chunks, lambda x: x.locate())
        if ranges is None or any(x.dtype != job.dtype for x in ranges):
            yield name, _read(job, tensor_slice, scratch)
        else:
            yield name, ranges


def _stored_slice(job: EntryRead, tensor_slice: TensorSlice) -> TensorSlice:
    """Return a part of the parameter in the coordinates of the stored tensor."""
    layers = len(job.tensor_slice.size) - len(job.shape)
    first = tuple(a + b for a, b in zip(job.tensor_slice.start, (0,) * layers + tensor_slice.start, strict=True))
    return TensorSlice(first, (1,) * layers + tensor_slice.size)


def _read(job: EntryRead, tensor_slice: TensorSlice, scratch: Scratch) -> Tensor:
    """Return one part of the parameter."""
    requested = _stored_slice(job, tensor_slice)
    data, held = read_slice(requested, job.chunks, lambda x: x.locate().map(), job.stored_dtype, scratch)
    if held != requested.numel:
        raise CheckpointError(f"{job.entry.megatron}: the checkpoint has {held} of {requested.numel} values")
    return data.reshape(tensor_slice.size).to(job.dtype)


def export_entries(job: EntryExport) -> Exported:
    """Write and hash the tensors of some entries.

    Raises:
        OSError: for example, the disk is full.
        CheckpointError: the checkpoint does not contain a whole parameter.
    """
    digests: dict[str, str] = {}
    scratch = Scratch()
    with ThreadPoolExecutor(1) as hasher, Writer() as writer:
        for entry in job.entries:
            order = {name: i for i, name in enumerate(entry.entry.hf_names)}
            for name, data in _hf_data(entry, scratch):
                hashing = hasher.submit(sha256, data) if job.hashed else None
                for target in entry.targets[order[name]] if entry.targets else ():
                    writer.write(target.path, target.offset, as_bytes(data))
                if hashing is not None:
                    digests[name] = hashing.result()
    return Exported(digests, job.num_bytes, writer.paths)


@dataclass(frozen=True)
class HashTensors:
    """Tensors in files."""

    tensors: tuple[tuple[str, TensorAt], ...]

    @property
    def num_bytes(self) -> int:
        return sum(x.num_bytes for _, x in self.tensors)


def hash_tensors(job: HashTensors) -> Exported:
    """Hash tensors in files."""
    with ThreadPoolExecutor(HASHERS) as hashers:
        digests = {name: hashers.submit(sha256, (x,)) for name, x in job.tensors}
        return Exported({name: x.result() for name, x in digests.items()}, job.num_bytes)


JOB_BYTES = 128 << 20
"""Bytes of one job."""


def batches[Item: Sized](items: Sequence[Item]) -> Iterator[tuple[Item, ...]]:
    """Group items, in order, until a job has enough bytes."""
    waiting: list[Item] = []
    for item in items:
        waiting.append(item)
        if sum(x.num_bytes for x in waiting) >= JOB_BYTES:
            yield tuple(waiting)
            waiting = []
    if waiting:
        yield tuple(waiting)


def export_all(title: str, reads: Sequence[EntryRead], *, hashed: bool, workers: int) -> dict[str, str]:
    """Write every entry to its targets and return the SHA-256 of each Hugging Face tensor, if `hashed`."""
    jobs = [EntryExport(batch, hashed) for batch in batches(reads)]
    return _digests(run_with_progress(title, export_entries, jobs, workers=workers))


def hash_files(title: str, tensors: Mapping[str, TensorAt], *, workers: int) -> dict[str, str]:
    """Return the SHA-256 of tensors in files."""
    names = {at: name for name, at in tensors.items()}
    jobs = [HashTensors(tuple((names[at], at) for at in batch)) for batch in batches(list(tensors.values()))]
    return _digests(run_with_progress(title, hash_tensors, jobs, workers=workers))


def _digests(results: Iterator[Exported]) -> dict[str, str]:
    return {name: digest for result in results for name, digest in result.digests.items()}
