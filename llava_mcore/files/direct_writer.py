"""Tensors written at their places in files, past the system's cache where the file system can.

A conversion writes what nobody reads soon. Through the cache every byte needs memory that has to be found first, and
that others' files are pushed out of. Blocks shared with neighbours, and small tensors, go through the cache.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

_BLOCK = max(4096, mmap.PAGESIZE)  # direct writes begin and end at multiples of this, in the file and in memory
_BUFFER = 2 << 20
_DIRECT_FROM = 256 << 10  # bytes; less is not worth a turn of the disk
# Linux takes one page of memory for as much of a file as one call writes. Large ones are slow to find, and when part of
# the data must itself come from a file first, the rest of such a page is zeroed for every 64 KiB that arrive.
_PIECE = 64 << 10
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


class Writer:
    """Writes into existing files; for one thread."""

    def __init__(self) -> None:
        self._files: dict[Path, _File] = {}
        self._buffer = torch.frombuffer(mmap.mmap(-1, _BUFFER), dtype=torch.uint8)  # begins at a page

    @property
    def paths(self) -> frozenset[Path]:
        """What has been written to, and is to be synced."""
        return frozenset(self._files)

    def write(self, path: Path, position: int, parts: Iterable[Tensor]) -> None:
        """Write bytes, flat tensors, one after the other from byte `position` of a file on.

        Raises:
            OSError: the disk is full, or the like.
        """
        if path not in self._files:
            self._files[path] = _File(path)
        file = self._files[path]
        begin = end = position % _BLOCK  # what the buffer holds, as far from a block's begin as in the file
        for part in parts:
            while len(part):
                count = min(len(part), _BUFFER - end)
                self._buffer[end : end + count].copy_(part[:count])  # by torch: other threads run
                part, end = part[count:], end + count
                if end == _BUFFER:
                    file.write(self._buffer[begin:end], position)
                    position, begin, end = position + end - begin, 0, 0
        file.write(self._buffer[begin:end], position)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()


class _File:
    """A file that is written to both ways."""

    def __init__(self, path: Path) -> None:
        self._cached = os.open(path, os.O_WRONLY)
        try:
            self._direct: int | None = os.open(path, os.O_WRONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _REFUSED:
                os.close(self._cached)
                raise
            self._direct = None

    def write(self, part: Tensor, position: int) -> None:
        """Write bytes whose offset in a block is the same in memory and in the file."""
        first = -position % _BLOCK
        last = len(part) - (position + len(part)) % _BLOCK
        done = 0
        if first + _DIRECT_FROM <= last:
            self._write_cached(part[:first], position)
            done = first + self._write_blocks(part[first:last], position + first)
        self._write_cached(part[done:], position + done)

    def _write_blocks(self, part: Tensor, position: int) -> int:
        """Return how many bytes were written; what is left has to go through the cache."""
        if self._direct is None:
            return 0
        try:
            return os.pwrite(self._direct, part.numpy().data, position)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self._close_direct()  # it wants larger blocks
            return 0

    def _write_cached(self, part: Tensor, position: int) -> None:
        rest = part.numpy().data
        while rest:
            written = os.pwrite(self._cached, rest[:_PIECE], position)
            rest, position = rest[written:], position + written

    def _close_direct(self) -> None:
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None

    def close(self) -> None:
        self._close_direct()
        os.close(self._cached)
