"""Headers of wavs whose length was not known when they were written, as by a program that writes to a pipe."""

from __future__ import annotations

import struct
from dataclasses import dataclass

RIFF, RIFX, RF64 = b"RIFF", b"RIFX", b"RF64"
"""First bytes of a wav: little-endian, big-endian, and with sizes of 64 bits in a chunk of their own."""
FIRST_CHUNK = 12
"""After RIFF, the size of the file, and WAVE."""
CHUNK_HEADER = 8
LARGE_SIZES, DATA_SIZE = b"ds64", 8
"""That chunk, and where in it the size of the samples is."""
UNKNOWN_SIZES = ((0x7FFF0000, 0x8000FFFF), (0xFFFF0000, 0xFFFFFFFF), (1 << 62, (1 << 64) - 1))
"""Sizes that programs write if they do not know it: SoX 0x7FFFF000, arecord 0x80000000, FFmpeg 0xFFFFFFFF, others these
less a header. Others write 0."""


@dataclass(frozen=True, slots=True)
class WavData:
    """The samples of a wav. `place`, `form`: where and how their size is written."""

    place: int
    form: str
    size: int
    existing: int
    """Bytes after the header of their chunk."""
    is_last: bool
    """Whether no other chunks follow."""

    @property
    def is_unknown(self) -> bool:
        """Whether the size says nothing, so that the samples reach to the end of the file."""
        if self.size == 0:
            return self.existing > 0 and self.is_last
        return self.size > self.existing and any(low <= self.size <= high for low, high in UNKNOWN_SIZES)


def find_samples(data: bytes) -> WavData | None:
    """Return where a wav's samples are; None if there is no chunk of them."""
    order = ">" if data.startswith(RIFX) else "<"
    header, large = struct.Struct(f"{order}4sI"), None
    offset = FIRST_CHUNK
    while offset + CHUNK_HEADER <= len(data):
        name, size = header.unpack_from(data, offset)
        start = offset + CHUNK_HEADER
        if name == LARGE_SIZES and start + DATA_SIZE + 8 <= len(data):
            large = start + DATA_SIZE
        if name == b"data":
            place, form = offset + 4, f"{order}I"
            if size == 0xFFFFFFFF and large is not None and data.startswith(RF64):
                place, form = large, f"{order}Q"
            (size,) = struct.unpack_from(form, data, place)
            return WavData(place, form, size, len(data) - start, not _is_chunks(data, start, header))
        offset = start + size + size % 2
    return None


def _is_chunks(data: bytes, offset: int, header: struct.Struct) -> bool:
    """Return whether bytes are a sequence of chunks: a wav without samples may have some after them."""
    while offset + CHUNK_HEADER <= len(data):
        name, size = header.unpack_from(data, offset)
        if not (name.isascii() and name.decode("latin-1").isprintable()):
            return False
        offset += CHUNK_HEADER + size + size % 2
    return offset in (len(data), len(data) + 1)


def with_length(data: bytes) -> bytes:
    """Return a sound with the size of its samples in the header, if that was unknown; otherwise the same bytes."""
    samples = find_samples(data) if data.startswith((RIFF, RIFX, RF64)) else None
    if samples is None or not samples.is_unknown:
        return data
    size = struct.pack(samples.form, samples.existing)
    return b"".join((data[: samples.place], size, data[samples.place + len(size) :]))
