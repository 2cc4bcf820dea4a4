"""References to images and audio clips in rows: files, base64, arrays, and messages about those that cannot be read."""

from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llava_mcore.config.sections.data import LIMITS
from llava_mcore.data.processors.audio_files import decode_audio
from llava_mcore.errors import DataError
from llava_mcore.files.near_match import near_hint, shortened
from llava_mcore.prepare.media.audios import read_audio
from llava_mcore.prepare.media.images import read_image
from llava_mcore.prepare.media.videos import read_video
from llava_mcore.prepare.row_types import BadSample
from llava_mcore.prepare.sampling import Sampling
from tests.helpers.prepare_cases import make
from tests.unit.data.test_data_shards import picture

PICTURE = picture(3)
TEXT, LINES = base64.b64encode(PICTURE).decode(), base64.encodebytes(PICTURE).decode()
URI = "data:image/jpeg;base64,"
WAVE = [math.sin(index / 20) / 2 for index in range(800)]


@pytest.mark.parametrize(
    "reference",
    [
        *(TEXT, LINES, URI + LINES, URI + TEXT.translate(str.maketrans("+/", "-_")).rstrip("=")),
        *(f"DATA:image/jpg;charset=x;BASE64,{TEXT.replace('+', '%2B')}", {"url": URI + TEXT}),
        *({"base64": TEXT}, {"bytes": LINES, "path": None}, {"bytes": PICTURE, "path": "gone.jpg"}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_contents_in_a_row(reference: Any) -> None:
    """An image's bytes are read in every form that rows hold them in."""
    assert read_image(reference, Path("/nowhere")).data == PICTURE


def test_a_file_named_like_base64(tmp_path: Path) -> None:
    name = base64.b64encode(PICTURE[:24]).decode().replace("/", "A")
    (tmp_path / name).write_bytes(PICTURE)
    assert read_image(name, tmp_path).data == PICTURE


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        (f"{URI}{TEXT[:4000]}*", r"the data URI /9j/\S{50,60} is not base64"),
        (f"data:image/jpeg,{TEXT}", r"must be data:image/…;base64,…, found data:image/jpeg,/9j"),
        ({"base64": TEXT + "A"}, "the base64 text .* is not base64"),
        ("x" * 100_000, "neither a file nor base64 of an image"),
        ([[1, 2], [3, 4]], "an image is a list of 2 numbers or lists; write a file, its bytes or its path$"),
        ({"array": WAVE}, "an image is an array of numbers"),
        ({"path": "", "bytes": None}, "an image is dict"),
    ],
)
def test_what_cannot_be_read_is_told_briefly(reference: Any, expected: str) -> None:
    with pytest.raises(BadSample, match=expected) as caught:
        read_image(reference, Path("/nowhere"))
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("written", "on_disk", "ways"),
    [
        (normalize("NFC", "Straße/café 1.jpg"), normalize("NFD", "Straße/café 1.jpg"), "Unicode form"),
        ("sub\\A.jpg", "sub/A.JPG", "backslashes and case"),
        ("a%20b.jpg", "a b.jpg", "percent signs"),
        ("a b.jpg", "a%20b.jpg", "percent signs"),
        (" a.jpg", "a.jpg", "blanks"),
    ],
)
def test_the_near_match_of_a_missing_file(tmp_path: Path, written: str, on_disk: str, ways: str) -> None:
    (tmp_path / on_disk).parent.mkdir(exist_ok=True)
    (tmp_path / on_disk).write_bytes(PICTURE)
    (tmp_path / "a.avi").touch()
    missing, match = shortened(str(tmp_path / written)), shortened(str(tmp_path / on_disk))
    expected = f"{missing}: No such file or directory; there is {match}, which differs in {ways}"
    with pytest.raises(BadSample) as caught:
        read_image(written, tmp_path)
    assert caught.value.detail == expected
    for name in ("gone.jpg", "sub/gone/x.jpg", "\0", "y" * 300):
        assert near_hint(tmp_path / name) == ""
    with pytest.raises(BadSample, match=r"there is .*a\.avi, which differs in case"):
        read_video("A.avi", tmp_path, Sampling(), LIMITS)


def test_audio_as_arrays(tmp_path: Path) -> None:
    """Arrays of samples become WAV files, mixed down to mono; impossible ones are refused."""
    sound = read_audio({"array": WAVE, "sampling_rate": 16000}, tmp_path, LIMITS, decode=True)
    assert (sound.extension, sound.seconds) == ("wav", 0.05)
    np.testing.assert_array_equal(decode_audio(sound.data, 16000), np.float32(WAVE))
    stereo = read_audio({"array": [WAVE, [0.0] * 800], "sampling_rate": 16000.0}, tmp_path, LIMITS)
    np.testing.assert_allclose(decode_audio(stereo.data, 16000), np.float32(WAVE) / 2, rtol=1e-6)
    for reference, expected in (
        ({"array": WAVE}, "the sampling_rate of an audio clip is null; expected"),
        ({"array": [9e3], "sampling_rate": 8000}, "samples up to 9000; expected .*numbers from -1 to 1"),
        ({"array": [[1.0], [1.0, 2.0]], "sampling_rate": 8000}, "an array of no shape"),
        (WAVE, "a list of 800 numbers or lists.*sampling_rate"),
    ):
        with pytest.raises(BadSample, match=expected):
            read_audio(reference, tmp_path, LIMITS)


def test_columns_of_arrays(tmp_path: Path) -> None:
    """What `datasets` saves of audio clips that are decoded; a column of bare arrays is told as that."""
    turns = [{"role": "user", "content": "<audio>\nWhat?"}, {"role": "assistant", "content": "A tone."}]
    sounds = [{"array": WAVE, "sampling_rate": 16000}] * 2
    pq.write_table(pa.table({"messages": [turns] * 2, "audio": sounds}), tmp_path / "a.parquet")
    assert make(tmp_path / "a.parquet", tmp_path / "out").counts.audios == 2
    pq.write_table(pa.table({"messages": [turns], "audio": [WAVE]}), tmp_path / "b.parquet")
    result = make(tmp_path / "b.parquet", tmp_path / "bare")
    assert "a list of 800 numbers" in str(result.first_skipped[0])
    with pytest.raises(DataError, match=r"A\.parquet does not exist; there is .*a\.parquet, which differs in case"):
        make(tmp_path / "A.parquet", tmp_path / "out")
