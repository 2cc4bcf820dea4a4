"""A reference to an audio clip -> its bytes, its length in seconds and the file suffix of its format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llava_mcore.config.sections.data import Limits
from llava_mcore.data.processors.audio_files import audio_format, check_audio, require_libraries
from llava_mcore.errors import DataError
from llava_mcore.prepare.media.references import AUDIO, read_reference
from llava_mcore.prepare.row_types import AudioFile, BadSample, Reason


def read_audio(reference: Any, folder: Path, limits: Limits, *, decode: bool = False) -> AudioFile:
    """Find an audio clip and read its header.

    Args:
        reference: see `read_reference`.
        decode: decode all of it, to check that it is complete.

    Raises:
        BadSample: it is missing, not on disk, of an unsupported format, too large, or broken.
        DataError: soundfile is not installed.
    """
    require_libraries()
    data = read_reference(reference, folder, limits.sample_bytes, AUDIO)
    try:
        extension, seconds = audio_format(data)
        if decode:
            check_audio(data)
    except DataError as error:
        raise BadSample(Reason.AUDIO_BROKEN, str(error)) from error
    return AudioFile(data, extension, seconds)
