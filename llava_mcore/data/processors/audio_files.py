"""Audio files: bytes -> the samples of one channel, or only their number.

soundfile decodes them by libsndfile, which its wheels contain: wav, flac, mp3 and ogg without FFmpeg, a header without
the rest, and blocks of a file without all of it. soxr resamples, as librosa does for transformers' `load_audio`.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llava_mcore.errors import DataError

if TYPE_CHECKING:
    from soundfile import SoundFile
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
    """The samples of a wav. A program that writes to a pipe does not know their size when it writes the header.

    `place`, `form`: where and how the size is written.
    """

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
    """Return a clip with the size of its samples in the header, if that was unknown; otherwise the same bytes."""
    samples = find_samples(data) if data.startswith((RIFF, RIFX, RF64)) else None
    if samples is None or not samples.is_unknown:
        return data
    size = struct.pack(samples.form, samples.existing)
    return b"".join((data[: samples.place], size, data[samples.place + len(size) :]))


FORMATS = {"WAV": "wav", "WAVEX": "wav", "RF64": "wav", "FLAC": "flac", "MP3": "mp3", "MPEG": "mp3", "OGG": "ogg"}
"""libsndfile's names of the formats, and the file suffix of each."""
MOST_CHANNELS, MOST_RATE = 64, 768_000
"""Beyond every recording: a header that claims more is damaged."""
UNKNOWN_LENGTH = 1 << 62
"""Number of samples that libsndfile gives for a flac without one."""
REWRITE = "ffmpeg -i old.flac new.flac"
BLOCK = 1 << 20
"""Values that are decoded at a time."""
NO_LIBRARY = 'sound needs soundfile and soxr: pip install "llava-mcore[audio]"'
PAGE, FLAGS, LAST_PAGE = b"OggS", 5, 4
"""The beginning of an ogg's page, where its flags are, and that of the last one."""


def require_libraries() -> None:
    """Raise DataError if soundfile or soxr is not installed."""
    try:
        import soundfile  # noqa: F401
        import soxr  # noqa: F401
    except ImportError as error:
        raise DataError(NO_LIBRARY) from error


def audio_length(data: bytes, rate: int) -> int:
    """Return the number of samples of an audio clip at `rate` per second, from its header (see `with_length`).

    DataError like `decode_audio`.
    """
    with _opened(data) as file:
        return resampled_length(file.frames, file.samplerate, rate)


def audio_format(data: bytes) -> tuple[str, float]:
    """Return the file suffix of a clip's format and its seconds, from its header. DataError like `decode_audio`."""
    with _opened(data) as file:
        return FORMATS[file.format], file.frames / file.samplerate


def decode_audio(data: bytes, rate: int) -> NDArray[np.float32]:
    """Return an audio clip as transformers' `load_audio` loads it, [samples]: the mean of its channels, resampled.

    Call `audio_length` first: an audio clip is decoded whatever its length.

    Raises:
        DataError: its format is not supported, or it is empty or damaged.
    """
    with _opened(data) as file:
        mono = np.concatenate([*_blocks(file)])
        length, own_rate = resampled_length(file.frames, file.samplerate, rate), file.samplerate
    return mono if own_rate == rate else _resampled(mono, own_rate, rate, length)


def check_audio(data: bytes) -> None:
    """Decode an audio clip of any length, block by block. DataError like `decode_audio`."""
    with _opened(data) as file:
        for _ in _blocks(file):
            pass


def resampled_length(num_samples: int, own_rate: int, rate: int) -> int:
    """Return how many samples there are at another rate, as librosa counts: rounded up."""
    return -(-num_samples * rate // own_rate)


def _opened(data: bytes) -> SoundFile:
    """Open an audio clip and check its header."""
    import soundfile

    if not data:
        raise DataError("an audio clip is empty (0 bytes)")
    try:
        data = with_length(data)
        file = soundfile.SoundFile(BytesIO(data))
    except soundfile.LibsndfileError as error:
        raise DataError(f"an audio clip of {len(data)} bytes cannot be opened: {_said(error)}") from error
    reason = _why_not(file, data)
    if reason is not None:
        file.close()
        raise DataError(reason)
    return file


def _why_not(file: SoundFile, data: bytes) -> str | None:
    if file.format not in FORMATS:
        return f"an audio clip has the format {file.format}; supported: {', '.join(dict.fromkeys(FORMATS.values()))}"
    if not 1 <= file.channels <= MOST_CHANNELS or not 1 <= file.samplerate <= MOST_RATE:
        return (
            f"an audio clip's header claims {file.channels} channels and {file.samplerate} samples per second; at most "
            f"{MOST_CHANNELS} and {MOST_RATE} are supported"
        )
    if file.frames >= UNKNOWN_LENGTH:
        return f"an audio clip does not say how long it is: write it to a file again, {REWRITE}"
    missing = _missing_end(data, file.format)
    if missing is not None:
        return f"an audio clip is truncated: {missing}"
    return "an audio clip has no samples" if file.frames < 1 else None


def _missing_end(data: bytes, kind: str) -> str | None:
    """Return why a file's end is missing, for formats of which libsndfile reads what there is."""
    if kind in ("WAV", "WAVEX", "RF64"):
        samples = find_samples(data)
        if samples is None:
            return "it has no samples"
        if samples.size <= samples.existing:
            return None
        return f"{samples.size} bytes of samples, of which {samples.existing} exist"
    if kind == "OGG" and not data[data.rfind(PAGE) + FLAGS] & LAST_PAGE:
        return "its last page is missing"
    return None


def _blocks(file: SoundFile) -> Iterator[NDArray[np.float32]]:
    """Yield the mean of the channels in blocks.

    Nothing is reserved for the length that the header claims. DataError if the samples are fewer, or not finite.
    """
    import soundfile

    done = 0
    try:
        while done < file.frames:
            block = file.read(max(1, BLOCK // file.channels), dtype="float32", always_2d=True)
            if not len(block):
                break
            done += len(block)
            mono = block.mean(axis=1)
            if not np.isfinite(mono).all():
                raise DataError("an audio clip has samples that are not finite")
            yield mono
    except (soundfile.LibsndfileError, RuntimeError, ValueError) as error:
        raise DataError(f"an audio clip cannot be decoded: {_said(error)}") from error
    if done != file.frames:
        raise DataError(f"an audio clip is truncated: {done} of {file.frames} samples could be decoded")


def _resampled(mono: NDArray[np.float32], own_rate: int, rate: int, length: int) -> NDArray[np.float32]:
    """Return the wave at another rate; soxr rounds its length, librosa then adds a zero or not."""
    import soxr

    wave = soxr.resample(mono, own_rate, rate, quality="HQ")[:length]
    return np.pad(wave, (0, length - len(wave)))


def _said(error: Exception) -> str:
    """Return what libsndfile says, without Python's name of the file."""
    text = str(error)
    _, separator, said = text.partition(">: ")
    return (said if separator else text).strip() or "libsndfile does not say why"
