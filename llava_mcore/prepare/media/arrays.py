"""Audio clips that a row holds as arrays of samples, as `datasets` decodes them."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llava_mcore.errors import with_article
from llava_mcore.prepare.row_types import BadSample, Reason, type_and_value

ARRAY_KEY, RATE_KEY = "array", "sampling_rate"
MOST_CHANNELS = 16
LOUDEST = 4.0
"""A recording may exceed 1, its full scale, but not by much: larger numbers are of another scale."""
EXPECTED = f'expected {{"{ARRAY_KEY}": [numbers from -1 to 1], "{RATE_KEY}": samples per second}}'


def array_as_file(reference: Mapping[str, Any], name: str) -> bytes:
    """Return a WAV file of 32-bit floating-point numbers with the samples of a reference. `name`: as in messages.

    Raises:
        BadSample: it is not an audio clip, or has no rate.
    """
    import soundfile  # the caller has checked that it is installed

    if name != "audio clip":
        raise BadSample(
            Reason.WRONG_TYPE, f"{with_article(name)} is an array of numbers; write a file, its bytes or its path"
        )
    rate = reference.get(RATE_KEY)
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or rate <= 0:
        raise BadSample(Reason.WRONG_TYPE, f"the {RATE_KEY} of an audio clip is {type_and_value(rate)}; {EXPECTED}")
    file = BytesIO()
    soundfile.write(file, _samples(reference[ARRAY_KEY]), round(rate), format="WAV", subtype="FLOAT")
    return file.getvalue()


def _samples(array: Any) -> NDArray[np.float32]:
    """Return samples [n] or [n, channels]. Integers are those of 16-bit files."""
    try:
        samples = np.asarray(array)
    except ValueError as error:  # lists of several lengths
        raise BadSample(Reason.WRONG_TYPE, f"an audio clip is an array of no shape; {EXPECTED}") from error
    if samples.dtype.kind not in "iuf" or samples.ndim not in (1, 2) or not samples.size:
        raise BadSample(Reason.WRONG_TYPE, f"an audio clip is an array of shape {samples.shape}; {EXPECTED}")
    if samples.ndim == 2 and samples.shape[0] <= MOST_CHANNELS:
        samples = samples.T
    samples = samples / 2.0**15 if samples.dtype.kind in "iu" else samples
    if not np.isfinite(samples).all() or np.abs(samples).max() > LOUDEST:
        raise BadSample(Reason.WRONG_TYPE, f"an audio clip has samples up to {np.abs(samples).max():g}; {EXPECTED}")
    return samples.astype(np.float32)


def is_array(value: Any) -> bool:
    """Return whether a list has numbers, perhaps in inner lists: then it is one thing, not a list of several."""
    if not isinstance(value, (list, tuple)) or len(value) < 2:
        return False
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def described(reference: Any, name: str) -> str:
    """Return what a value is that refers to nothing. `name`: what it should refer to."""
    if isinstance(reference, (list, tuple)) and is_array(reference):
        hint = f", or {EXPECTED[9:]}" if name == "audio clip" else ""
        return f"a list of {len(reference)} numbers or lists; write a file, its bytes or its path{hint}"
    return type_and_value(reference)
