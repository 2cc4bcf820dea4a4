"""The order of a source's rows, shuffled by a seed: where each row of a shard is, without an order in memory.

The order is a permutation that is computed, so every process knows the rows of its shard from their indices alone. Rows
are then read one by one. What is stored is the place of each row in files that have no indices: 16 bytes, on disk.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from llava_mcore.data.order.dataset_order import finalized
from llava_mcore.prepare.row_types import RowRange, ShuffledRows

ROUNDS = 8
IN_MEMORY = 1 << 24
"""Bytes of offsets that are held before they go to a temporary file."""
BUFFERED = 1 << 13
"""Offsets to write at a time."""
BY_NUMBER = -1
Indices = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Permutation:
    """A permutation of the numbers below `size` that depends on a seed.

    It is a Feistel network over the smallest even number of bits that holds them; a result that is not below `size` is
    permuted again, until it is (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
    """

    size: int
    seed: int

    def __call__(self, positions: Indices) -> Indices:
        """Return the indices at positions of the permuted sequence."""
        indices = self._encrypt(positions)
        while (outside := indices >= self.size).any():
            indices[outside] = self._encrypt(indices[outside])
        return indices

    def _encrypt(self, indices: Indices) -> Indices:
        half = np.uint64(max(1, -(-(self.size - 1).bit_length() // 2)))
        mask = (np.uint64(1) << half) - np.uint64(1)
        left, right = indices >> half, indices & mask
        for round_ in range(ROUNDS):
            digest = hashlib.sha256(f"{self.seed} {round_}".encode()).digest()
            left, right = right, left ^ (finalized(right ^ np.uint64(int.from_bytes(digest[:8], "little"))) & mask)
        return (left << half) | right


class RowOffsets:
    """Collects the first and the last byte of rows while a source is read through, in the order of the rows."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._buffer = array("Q")
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(IN_MEMORY)  # noqa: SIM115 — closed with this object

    def add(self, start: int, stop: int) -> None:
        """Take the next row: its first byte, and the one after its last."""
        self._buffer.extend((start, stop))
        self.num_rows += 1
        if len(self._buffer) >= BUFFERED:
            self._flush()

    def save(self, path: Path) -> None:
        """Write all of them to a file, as uint64 [rows, 2]."""
        self._flush()
        self._file.seek(0)
        with path.open("wb") as file:
            shutil.copyfileobj(self._file, file)

    def _flush(self) -> None:
        self._file.write(self._buffer.tobytes())
        self._buffer = array("Q")


@dataclass(slots=True)
class ShuffledOrder:
    """Which row is at which position of the shuffled source. Small, and sent to every process."""

    seed: int
    num_rows: int
    first_rows: Sequence[int]
    """Rows of the source before each file."""
    first_offsets: Sequence[int]
    """Rows with offsets before each file; BY_NUMBER: its rows are found by their number."""
    offsets: Path
    """File of `RowOffsets`, which may be empty."""
    _mapped: Indices | None = field(default=None, init=False, repr=False, compare=False)

    def rows(self, part: ShuffledRows) -> Iterator[RowRange]:
        """Yield the rows at some positions, each as a range of one row. `RowRange.row` is its position."""
        positions = np.arange(part.first, part.first + part.count, dtype=np.uint64)
        indices = Permutation(self.num_rows, self.seed)(positions).astype(np.int64)
        files = np.searchsorted(np.asarray(self.first_rows), indices, side="right") - 1
        for position, row, file in zip(positions.tolist(), indices.tolist(), files.tolist(), strict=True):
            index, start, stop = row - self.first_rows[file], 0, 0
            if self.first_offsets[file] != BY_NUMBER:
                start, stop = map(int, self._offsets()[self.first_offsets[file] + index])
            yield RowRange(file, position, index, 1, start, stop)

    def _offsets(self) -> Indices:
        """Map the file of offsets into memory, once per process."""
        if self._mapped is None:
            self._mapped = np.memmap(self.offsets, np.uint64, "r").reshape(-1, 2)
        return self._mapped
