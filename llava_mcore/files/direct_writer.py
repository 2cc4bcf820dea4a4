"""Writes tensors at given offsets of files, bypassing the page cache if the file system supports it.

A conversion writes what nobody reads soon. Through the cache every byte needs memory that has to be found first, which
evicts other files. Blocks shared with neighboring tensors, and small tensors, go through the cache.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

_BLOCK = max(4096, mmap.PAGESIZE)  # direct writes start and end at multiples of this, in the file and in memory
_BUFFER = 2 << 20
_DIRECT_FROM = 256 << 10  # bytes; smaller writes do not pay off
# Linux allocates one (large) page of memory for as much of a file as one call writes. Large pages are slow to find, and
# if the data itself is mapped from a file, the rest of such a page is zeroed for every 64 KiB that arrive.
_PIECE = 64 << 10
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


class Writer:
    """Writes into existing files; not thread-safe."""

    def __init__(self) -> None:
        self._files: dict[Path, _File] = {}
        self._buffer = torch.frombuffer(mmap.mmap(-1, _BUFFER), dtype=torch.uint8)  # starts at a page

    @property
    def paths(self) -> frozenset[Path]:
        """The files written to, which have to be synced."""
        return frozenset(self._files)

    def write(self, path: Path, position: int, parts: Iterable[Tensor]) -> None:
        """Write flat byte tensors one after the other, starting at byte `position` of a file.

        Raises:
            OSError: for example, the disk is full.
        """
        if path not in self._files:
            self._files[path] = _File(path)
        file = self._files[path]
        begin = end = position % _BLOCK  # the buffer's contents, at the same offset within a block as in the file
        for part in parts:
            while len(part):
                count = min(len(part), _BUFFER - end)
                self._buffer[end : end + count].copy_(part[:count])  # by torch, so that other threads can run
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
    """A file that is written to directly and through the cache."""

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
        """Return the number of bytes written; the rest has to go through the cache."""
        if self._direct is None:
            return 0
        try:
            return os.pwrite(self._direct, part.numpy().data, position)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self._close_direct()  # it needs larger blocks
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
