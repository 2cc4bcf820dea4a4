"""Sound files: bytes -> the samples of one channel, or only their number.

soundfile decodes them by libsndfile, which its wheels contain: wav, flac, mp3 and ogg without FFmpeg, a header without
the rest, and blocks of a file without all of it. soxr resamples, as librosa does for transformers' `load_audio`.
"""

from __future__ import annotations

import struct
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llava_mcore.errors import DataError

if TYPE_CHECKING:
    from soundfile import SoundFile

FORMATS = {"WAV": "wav", "WAVEX": "wav", "RF64": "wav", "FLAC": "flac", "MP3": "mp3", "MPEG": "mp3", "OGG": "ogg"}
"""libsndfile's names of the formats, and the file suffix of each."""
MOST_CHANNELS, MOST_RATE = 64, 768_000
"""Beyond every recording: a header that claims more is damaged."""
BLOCK = 1 << 20
"""Values that are decoded at a time."""
NO_LIBRARY = 'sound needs soundfile and soxr: pip install "llava-mcore[audio]"'
CHUNK = struct.Struct("<4sI")
UNKNOWN_SIZES = (0, 0xFFFFFFFF)
"""What a program writes for the size of a wav's data if it cannot seek back to fill it in."""
PAGE, FLAGS, LAST_PAGE = b"OggS", 5, 4
"""The beginning of an ogg's page, where its flags are, and that of the last one."""


def require_libraries() -> None:
    """Raise DataError if soundfile or soxr is not installed."""
    try:
        import soundfile  # noqa: F401
        import soxr  # noqa: F401
    except ImportError as error:
        raise DataError(NO_LIBRARY) from error


def sound_length(data: bytes, rate: int) -> int:
    """Return the samples of a sound at `rate` per second, from its header. DataError like `decode_sound`."""
    with _opened(data) as file:
        return resampled_length(file.frames, file.samplerate, rate)


def sound_format(data: bytes) -> tuple[str, float]:
    """Return the file suffix of a sound's format and its seconds, from its header. DataError like `decode_sound`."""
    with _opened(data) as file:
        return FORMATS[file.format], file.frames / file.samplerate


def decode_sound(data: bytes, rate: int) -> NDArray[np.float32]:
    """Return a sound as transformers' `load_audio` loads it, [samples]: the mean of its channels, resampled.

    Call `sound_length` first: a sound is decoded whatever its length.

    Raises:
        DataError: its format is not supported, or it is empty or damaged.
    """
    with _opened(data) as file:
        mono = _mono(file)
        wanted, own_rate = resampled_length(file.frames, file.samplerate, rate), file.samplerate
    if not np.isfinite(mono).all():
        raise DataError("a sound has samples that are not finite")
    return mono if own_rate == rate else _resampled(mono, own_rate, rate, wanted)


def resampled_length(num_samples: int, own_rate: int, rate: int) -> int:
    """Return how many samples there are at another rate, as librosa counts: rounded up."""
    return -(-num_samples * rate // own_rate)


def _opened(data: bytes) -> SoundFile:
    """Open a sound and check its header."""
    import soundfile

    if not data:
        raise DataError("a sound is empty (0 bytes)")
    try:
        file = soundfile.SoundFile(BytesIO(data))
    except soundfile.LibsndfileError as error:
        raise DataError(f"a sound of {len(data)} bytes cannot be opened: {_said(error)}") from error
    found = _why_not(file, data)
    if found is not None:
        file.close()
        raise DataError(found)
    return file


def _why_not(file: SoundFile, data: bytes) -> str | None:
    if file.format not in FORMATS:
        return f"a sound has the format {file.format}; supported: {', '.join(dict.fromkeys(FORMATS.values()))}"
    if not 1 <= file.channels <= MOST_CHANNELS or not 1 <= file.samplerate <= MOST_RATE:
        return (
            f"a sound's header claims {file.channels} channels and {file.samplerate} samples per second; at most "
            f"{MOST_CHANNELS} and {MOST_RATE} are supported"
        )
    missing = _missing_end(data, file.format)
    if missing is not None:
        return f"a sound is truncated: {missing}"
    return "a sound has no samples" if file.frames < 1 else None


def _missing_end(data: bytes, kind: str) -> str | None:
    """Return why a file's end is missing, for formats of which libsndfile reads what there is."""
    if kind in ("WAV", "WAVEX"):
        return _missing_data(data)
    if kind == "OGG" and not data[data.rfind(PAGE) + FLAGS] & LAST_PAGE:
        return "its last page is missing"
    return None


def _missing_data(data: bytes) -> str | None:
    """Compare the size of a wav's data with what there is."""
    offset = 12  # after RIFF, size, WAVE
    while offset + CHUNK.size <= len(data):
        name, size = CHUNK.unpack_from(data, offset)
        offset += CHUNK.size
        if name == b"data":
            left = len(data) - offset
            return None if size in UNKNOWN_SIZES or size <= left else f"{size} bytes of samples, of which {left} exist"
        offset += size + size % 2
    return "it has no samples"


def _mono(file: SoundFile) -> NDArray[np.float32]:
    """Return the mean of the channels, decoded in blocks."""
    import soundfile

    mono, done = np.empty(file.frames, dtype=np.float32), 0
    try:
        while done < len(mono):
            block = file.read(max(1, BLOCK // file.channels), dtype="float32", always_2d=True)
            if not len(block):
                break
            mono[done : done + len(block)] = block.mean(axis=1)
            done += len(block)
    except (soundfile.LibsndfileError, RuntimeError, ValueError) as error:
        raise DataError(f"a sound cannot be decoded: {_said(error)}") from error
    if done != len(mono):
        raise DataError(f"a sound is truncated: {done} of {len(mono)} samples could be decoded")
    return mono


def _resampled(mono: NDArray[np.float32], own_rate: int, rate: int, wanted: int) -> NDArray[np.float32]:
    """Return the wave at another rate; soxr rounds its length, librosa then adds a zero or not."""
    import soxr

    found = soxr.resample(mono, own_rate, rate, quality="HQ")[:wanted]
    return np.pad(found, (0, wanted - len(found)))


def _said(error: Exception) -> str:
    """Return what libsndfile says, without Python's name of the file."""
    text = str(error)
    _, found, said = text.partition(">: ")
    return (said if found else text).strip() or "libsndfile does not say why"
