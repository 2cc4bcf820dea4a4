"""Duplicates: planted ones are found, different samples are not, and training leaves them out."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageEnhance

from llava_mcore.cli.dedup import main
from llava_mcore.data.encode.assets import Assets
from llava_mcore.dedup.candidates import MAX_BITS
from llava_mcore.dedup.confirm import Confirmed
from llava_mcore.dedup.find import find_groups
from llava_mcore.dedup.report import LIST, PAGE, SHEET
from llava_mcore.dedup.signature import EMPTY, SamplePlace, Signature, differing_bits, perceptual_hash
from tests.unit.data.test_data_loader import open_loader, take
from tests.unit.data.test_data_shards import prepare, write_shard

pytest_plugins = ("tests.helpers.llava_fixtures",)

COUNT, COPIED = 16, 4
"""Different images, and those of which there are copies."""


def scene(index: int) -> Image.Image:
    """Return an image of smooth random colors and a few shapes."""
    random = np.random.default_rng(index)
    small = Image.fromarray(random.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    image = small.resize((128, 96), Image.Resampling.BICUBIC)
    for _ in range(4):
        x, y, w, h = random.integers(0, 80, 4)
        image.paste(tuple(int(c) for c in random.integers(0, 256, 3)), (int(x), int(y), int(x + w), int(y + h)))
    return image


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def sample(key: str, image: bytes, question: str = "What is in the image?", answer: str = "Shapes.") -> dict[str, Any]:
    """Return a sample of a CrudeWebdataset."""
    messages = [{"role": "user", "content": f"<image>\n{question}"}, {"role": "assistant", "content": answer}]
    return {"__key__": key, "jpg": image, "json": {"messages": messages}}


def dataset(folder: Path, samples: list[dict[str, Any]]) -> Path:
    write_shard(folder / "000000.tar", samples)
    return prepare(folder, "CrudeWebdataset")


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some samples; of the first ones, copies that are equal, resized, compressed again; and others that only look
    alike."""
    samples = [sample(f"{i:04d}", encoded(scene(i)), f"What is in image {i}?") for i in range(COUNT)]

    def copy(kind: str, i: int, image: bytes, **changes: str) -> dict[str, Any]:
        return sample(f"{kind}{i:04d}", image, **({"question": f"What is in image {i}?"} | changes))

    for i in range(COPIED):
        half = scene(i).resize((64, 48))
        samples.append(copy("same", i, encoded(scene(i))))
        samples.append(copy("small", i, encoded(half)))
        samples.append(copy("jpeg", i, encoded(scene(i), "JPEG", quality=30)))
        samples.append(copy("red", i, encoded(ImageEnhance.Color(scene(i).rotate(180)).enhance(0.2))))
        samples.append(copy("asked", i, encoded(scene(i)), question="How many rectangles are there?", answer="Four."))
    return dataset(tmp_path_factory.mktemp("data"), samples)


def found(out: Path) -> set[tuple[str, str]]:
    """Return (duplicate, of) of the list."""
    rows = [json.loads(line) for line in (out / LIST).read_text().splitlines()]
    return {(row["duplicate"]["key"], row["of"]["key"]) for row in rows}


def run(*arguments: object) -> int:
    return main([str(x) for x in arguments])


def test_planted_duplicates_are_found_and_nothing_else(planted: Path, tmp_path: Path) -> None:
    assert run("--data-path", planted, "--out", tmp_path, "--num-workers", 0) == 0
    expected = {(f"{kind}{i:04d}", f"{i:04d}") for kind in ("same", "small", "jpeg") for i in range(COPIED)}
    assert found(tmp_path) == expected
    assert (tmp_path / PAGE).read_text().count("<section>") == COPIED
    with Image.open(tmp_path / SHEET) as sheet:
        assert sheet.width > 100 and sheet.height > 160 * (COPIED - 1)


def test_what_two_samples_must_share(planted: Path, tmp_path: Path) -> None:
    run("--data-path", planted, "--out", tmp_path, "--exact", "--num-workers", 2)
    assert found(tmp_path) == {(f"same{i:04d}", f"{i:04d}") for i in range(COPIED)}
    run("--data-path", planted, "--out", tmp_path, "--match", "image", "--num-workers", 0)
    kinds = {key.rstrip("0123456789") for key, _ in found(tmp_path)}
    assert kinds == {"same", "small", "jpeg", "asked"}
    run("--data-path", planted, "--out", tmp_path, "--match", "text", "--num-workers", 0)
    assert ("red0003", "0003") in found(tmp_path)


def test_an_evaluation_set_in_training_data(planted: Path, tmp_path: Path) -> None:
    evaluation = dataset(tmp_path / "eval", [
        sample("a", encoded(scene(3).resize((200, 150))), "What is in image 3?"),
        sample("b", encoded(scene(999))),
    ])  # fmt: skip
    run("--data-path", planted, "--against", evaluation, "--out", tmp_path / "out", "--num-workers", 0)
    assert {of for _, of in found(tmp_path / "out")} == {"a"}
    assert {key for key, _ in found(tmp_path / "out")} == {"0003", "same0003", "small0003", "jpeg0003"}


def test_training_leaves_out_what_is_excluded(
    assets: Assets, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [sample(f"{i:04d}", encoded(scene(i)), f"Image {i}?") for i in range(4)]
    samples += [sample(f"copy{i}", encoded(scene(i)), f"Image {i}?") for i in range(3)]
    path = dataset(tmp_path / "data", samples)
    shard = (path / "000000.tar").read_bytes()
    run("--data-path", path, "--out", tmp_path / "out", "--exclude", "--num-workers", 0)
    assert "3 duplicates in 3 groups: 3 exact, 0 near" in capsys.readouterr().out
    assert (path / "000000.tar").read_bytes() == shard
    seen = {key for batch in take(open_loader(path, assets, seq_length=128), 20) for key in batch.sample_keys}
    assert seen == {f"{i:04d}" for i in range(4)}
    run("--data-path", path, "--out", tmp_path / "out", "--exclude", "--num-workers", 0)
    output = capsys.readouterr().out
    assert "0 duplicates" in output and "3 samples are excluded by split.yaml already" in output


def test_videos_are_compared_by_their_frames(tmp_path: Path) -> None:
    """A copy with smaller frames is found, other frames and another number of frames are not."""

    def clip(key: str, scenes: list[int], size: tuple[int, int] = (128, 96)) -> dict[str, Any]:
        messages = [{"role": "user", "content": "<video>\nWhat moves?"}, {"role": "assistant", "content": "Shapes."}]
        names = [f"{n}.jpg" for n in range(len(scenes))]
        frames = {name: encoded(scene(n).resize(size)) for name, n in zip(names, scenes, strict=True)}
        return {"__key__": key, "json": {"messages": messages, "videos": [{"frames": names}]}, **frames}

    samples = [clip("a", [1, 2, 3]), clip("other", [1, 9, 3]), clip("copy", [1, 2, 3], (64, 48)), clip("short", [1, 2])]
    path = dataset(tmp_path / "data", samples)
    run("--data-path", path, "--out", tmp_path / "out", "--num-workers", 0)
    assert found(tmp_path / "out") == {("copy", "a")}


def test_a_chain_of_small_changes_is_no_group() -> None:
    """Each image is like the one before; of the first one, only those near it are duplicates."""
    places = [SamplePlace(0, n, "000000.tar", f"{n}") for n in range(6)]
    signatures = [Signature(place, b"%d" % place.index, EMPTY.hashvalues, (b"\0" * 32,), b"") for place in places]
    groups = find_groups(signatures, Near(), "image")  # type: ignore[arg-type]
    assert [(group.first.index, [x.place.index for x in group.duplicates]) for group in groups] == [
        (0, [1, 2]),
        (3, [4, 5]),
    ]


class Near:
    """Compares numbers instead of images."""

    def compare(self, one: SamplePlace, other: SamplePlace) -> Confirmed | None:
        return Confirmed(1.0, 0.0) if abs(one.index - other.index) <= 2 else None


def test_symmetric_drawings_keep_their_hash() -> None:
    """Half of the frequencies of a ring are about 0; compressing it must not change their bits."""
    ring = Image.new("RGB", (200, 200), "white")
    ImageDraw.Draw(ring).ellipse((40, 40, 160, 160), outline="gray", width=3)
    with Image.open(io.BytesIO(encoded(ring, "JPEG", quality=60))) as compressed:
        assert differing_bits(perceptual_hash(ring), perceptual_hash(compressed)) <= MAX_BITS / 2


def test_broken_samples_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = dataset(tmp_path / "data", [sample("a", encoded(scene(1))), sample("b", b"no image")])
    assert run("--data-path", path, "--out", tmp_path / "out", "--num-workers", 0) == 0
    assert "1 samples cannot be read and were not compared" in capsys.readouterr().out
