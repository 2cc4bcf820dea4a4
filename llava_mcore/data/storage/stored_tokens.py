"""The file beside a shard with the tokens of its samples, `000000.tar.tokens`, which `prepare` writes.

Training reads a sample's tokens from it as they are, instead of decoding them, and the text that they belong to, from
the sample's json. A shard without the file is read as any other. Its layout, little-endian:

    magic, length of the header, header (JSON: fingerprint of the tokens, bytes of the shard, samples)
    offsets     uint64 [samples + 1], of the entries, from the beginning of the file
    entries     see `StoredTokens`; empty for a sample with videos, audio clips or several conversations
"""

from __future__ import annotations

import errno
import json
import logging
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from llava_mcore.files.regular import RefusedFileError, open_regular_file

MAGIC = b"llava-mcore tokens 1\n"
LENGTH = struct.Struct("<I")
HEAD = struct.Struct("<5I")
"""An entry's head: checksum of what follows, checksum of the json part, characters, images, ids."""
MAX_HEADER = 1 << 16
logger = logging.getLogger(__name__)


def tokens_file(shard: Path) -> Path:
    """Return the path of the file beside a shard."""
    return shard.with_name(f"{shard.name}.tokens")


@dataclass(frozen=True, slots=True)
class StoredTokens:
    """The tokens of one conversation, with one placeholder per image."""

    of_json: int
    """CRC-32 of the json part that they were computed with: another one may have another text."""
    num_chars: int
    """Characters of all turns."""
    num_images: int
    ids: NDArray[np.uint32]
    spans: NDArray[np.uint32]
    """Bounds of the trained spans: start, end, start, end, …"""

    def to_bytes(self) -> bytes:
        """Return the entry."""
        body = self.ids.astype("<u4").tobytes() + self.spans.astype("<u4").tobytes()
        rest = HEAD.pack(0, self.of_json, self.num_chars, self.num_images, len(self.ids))[4:] + body
        return zlib.crc32(rest).to_bytes(4, "little") + rest

    @classmethod
    def from_bytes(cls, entry: bytes) -> Self:
        """The inverse of `to_bytes`. ValueError for a damaged entry."""
        if len(entry) < HEAD.size or zlib.crc32(entry[4:]) != int.from_bytes(entry[:4], "little"):
            raise ValueError("a checksum is wrong")
        _, of_json, num_chars, num_images, num_ids = HEAD.unpack_from(entry)
        values = np.frombuffer(entry, "<u4", offset=HEAD.size)
        return cls(of_json, num_chars, num_images, values[:num_ids], values[num_ids:])


def as_file(entries: Sequence[bytes], fingerprint: str, shard_bytes: int) -> bytes:
    """Return the contents of the file.

    Args:
        entries: of each sample, empty for one without stored tokens.
        fingerprint: of tokenizer and chat template.
        shard_bytes: size of the tar file.
    """
    header = json.dumps({"by": fingerprint, "bytes": shard_bytes, "samples": len(entries)}).encode()
    start = len(MAGIC) + LENGTH.size + len(header) + 8 * (len(entries) + 1)
    offsets = start + np.cumsum([0, *map(len, entries)], dtype=np.uint64)
    return b"".join([MAGIC, LENGTH.pack(len(header)), header, offsets.astype("<u8").tobytes(), *entries])


class TokensOfShard:
    """The open file of one shard."""

    def __init__(self, shard: Path) -> None:
        """Open it.

        Raises:
            OSError, RefusedFileError: it is not there, or cannot be read.
            ValueError: it is damaged, or belongs to another shard.
        """
        self._file = open_regular_file(tokens_file(shard), buffering=0)
        try:
            size = os.fstat(self._file.fileno()).st_size
            start = len(MAGIC) + LENGTH.size
            begin = os.pread(self._file.fileno(), start + MAX_HEADER, 0)
            if not begin.startswith(MAGIC) or len(begin) < start:
                raise ValueError("it does not begin as such a file does")
            length = LENGTH.unpack_from(begin, len(MAGIC))[0]
            header = json.loads(begin[start : start + length])
            self.fingerprint, num_samples = str(header["by"]), int(header["samples"])
            num_bytes = shard.stat().st_size
            if header["bytes"] != num_bytes:
                raise ValueError(f"it belongs to a shard of {header['bytes']} bytes, but {shard.name} has {num_bytes}")
            offsets = os.pread(self._file.fileno(), 8 * (num_samples + 1), start + length)
            self._offsets = np.frombuffer(offsets, "<u8")
            if len(self._offsets) != num_samples + 1 or self._offsets[-1] != size:
                raise ValueError("it was truncated")
        except (KeyError, TypeError, ValueError) as error:
            self._file.close()
            raise ValueError(str(error)) from error

    def entry(self, index: int) -> StoredTokens | None:
        """Return the tokens of a sample; None if it has none. ValueError if they are damaged."""
        if not 0 <= index < len(self._offsets) - 1:
            raise ValueError(f"it has no sample {index}")
        start, end = int(self._offsets[index]), int(self._offsets[index + 1])
        return StoredTokens.from_bytes(os.pread(self._file.fileno(), end - start, start)) if end > start else None

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def open_tokens(shard: Path) -> TokensOfShard | None:
    """Return the file of a shard; None if there is none, or if it cannot be used, which is logged.

    Raises OSError if the process cannot open more files.
    """
    try:
        return TokensOfShard(shard)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RefusedFileError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise  # other shards have to be closed
        warn_of_damage(shard, error)
        return None


_WARNED: set[Path] = set()


def warn_of_damage(shard: Path, error: Exception) -> None:
    """Log what is wrong with the file of a shard, once for each dataset and process."""
    if shard.parent in _WARNED:
        return
    _WARNED.add(shard.parent)
    logger.warning(
        "%s cannot be used: %s. The tokens in the shard are used instead, which takes a little more CPU time. If the "
        "shard was changed on purpose, delete this file; otherwise prepare the data again. Others of this dataset are "
        "not mentioned",
        tokens_file(shard),
        error,
    )
