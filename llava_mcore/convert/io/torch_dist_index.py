"""Contents of a Megatron checkpoint (torch_dist) and their locations, from its metadata alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from llava_mcore.checkpoint.torch_dist_metadata import read_metadata
from llava_mcore.convert.io.export_jobs import Chunk
from llava_mcore.errors import CheckpointError
from llava_mcore.files.tensor_bytes import TensorAt
from llava_mcore.weights.slices import Shape, TensorSlice


@dataclass(frozen=True)
class StoredParameter:
    """A parameter is `tensor_slice` of a stored tensor; `chunks`, in the same coordinates, overlap with it."""

    tensor_slice: TensorSlice
    chunks: tuple[tuple[TensorSlice, Chunk | TensorAt], ...]
    dtype: torch.dtype


class StoredTensors:
    """Keys, shapes, dtypes and chunks of every tensor in one iteration's folder."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self.folder, self._storage = folder, metadata.storage_data
        self._tensors = {
            key: x for key, x in metadata.state_dict_metadata.items() if isinstance(x, TensorStorageMetadata)
        }

    @classmethod
    def open(cls, folder: Path) -> StoredTensors:
        """Read the metadata.

        Raises:
            CheckpointError: like `read_metadata`.
        """
        return cls(folder, read_metadata(folder))

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, key: str) -> Shape:
        """Return the global shape of one tensor, including dims for layers."""
        return tuple(self._tensors[key].size)

    def num_rows(self, key: str) -> int:
        """Return the number of rows of a tensor that does not belong to a layer."""
        return self.shape(key)[0]

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of one tensor."""
        return self._tensors[key].properties.dtype

    def parameter(self, key: str, requested: TensorSlice) -> StoredParameter:
        """Return a slice of one tensor, with the chunks that overlap with it.

        Raises:
            CheckpointError: a chunk is stored in a way that only torch.distributed.checkpoint's extensions read.
        """
        low, high = (requested.start[0], requested.start[0] + requested.size[0]) if requested.size else (0, 1)
        chunks: list[tuple[TensorSlice, Chunk | TensorAt]] = []
        for x in self._tensors[key].chunks:
            if requested.size and not (x.offsets[0] < high and low < x.offsets[0] + x.sizes[0]):
                continue  # usually another layer: a stored tensor has a chunk for each
            info = self._storage[MetadataIndex(key, x.offsets)]
            if info.transform_descriptors:
                raise CheckpointError(f"{self.folder}: {key} is stored with {info.transform_descriptors}")
            path = self.folder / info.relative_path
            chunks.append((TensorSlice(tuple(x.offsets), tuple(x.sizes)), Chunk(path, info.offset, info.length)))
        return StoredParameter(requested, tuple(chunks), self.dtype(key))
