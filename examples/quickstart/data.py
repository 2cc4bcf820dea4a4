"""Scans of handwritten digits → images with questions: energon shards to train on, a folder to be examined on.

The scans are the 1,797 that scikit-learn ships (8 x 8 pixels, 17 levels of gray). One in five is held out, by scan:
no image made from a held-out scan, however moved or turned, gets into a shard.
"""

from __future__ import annotations

import io
import json
import math
import random
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from questions import FORMS, ask, draw_form
from sklearn.datasets import load_digits

IMAGE_SIZE = 56
"""Pixels along an edge of an image."""
SPLIT_SEED = 0
SHARD_SIZE = 2000
"""Samples in one shard."""


@dataclass(frozen=True)
class Scan:
    """One handwritten digit. `ink` [8, 8] is uint8: 0 for paper, 255 for full ink."""

    number: int
    digit: int
    ink: np.ndarray


@dataclass(frozen=True)
class Exam:
    """A question about a held-out scan, with the answer that counts as right."""

    scan: int
    image: str
    form: str
    question: str
    answer: str


def load_scans() -> list[Scan]:
    """Return all scans in the package's order; a scan's number is its place in it."""
    bunch = load_digits()
    ink = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    return [Scan(number, int(digit), ink[number]) for number, digit in enumerate(bunch.target)]


def split_scans(scans: list[Scan]) -> tuple[list[Scan], list[Scan]]:
    """Return (to train on, held out): a fifth of the scans of every digit is held out, the same ones every time."""
    rng = random.Random(SPLIT_SEED)
    held_out: set[int] = set()
    for digit in range(10):
        numbers = [scan.number for scan in scans if scan.digit == digit]
        held_out.update(rng.sample(numbers, len(numbers) // 5))
    return [s for s in scans if s.number not in held_out], [s for s in scans if s.number in held_out]


def draw(scan: Scan, rng: random.Random | None = None) -> Image.Image:
    """Return the scan as dark ink on white, RGB, IMAGE_SIZE pixels; with `rng` slightly moved, turned and scaled."""
    picture = Image.fromarray(255 - scan.ink).resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC)
    if rng is not None:
        picture = _jitter(picture, rng)
    return picture.convert("RGB")


def _jitter(picture: Image.Image, rng: random.Random) -> Image.Image:
    """Turn by up to 12 degrees, scale by up to a tenth, move by up to a fourteenth of the image."""
    angle, scale = math.radians(rng.uniform(-12, 12)), 1 / rng.uniform(0.9, 1.1)
    cos, sin, middle = math.cos(angle) * scale, math.sin(angle) * scale, IMAGE_SIZE / 2
    x, y = (middle + rng.uniform(-1, 1) * IMAGE_SIZE / 14 for _ in range(2))
    matrix = (cos, sin, middle - cos * x - sin * y, -sin, cos, middle + sin * x - cos * y)
    return picture.transform(picture.size, Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC, fillcolor=255)


def jpeg(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=92)
    return buffer.getvalue()


def write_shards(folder: Path, scans: list[Scan], num_samples: int, progress: Callable[[], None]) -> None:
    """Write `num_samples` samples (jpg, txt, json) as webdataset shards; every scan is drawn equally often.

    Each sample is a new drawing of its scan with a question of its own. `progress` is called after each sample.
    """
    folder.mkdir(parents=True)
    rng = random.Random(SPLIT_SEED + 1)
    order: Iterator[Scan] = iter(())
    for first in range(0, num_samples, SHARD_SIZE):
        with tarfile.open(folder / f"shard_{first // SHARD_SIZE:04d}.tar", "w") as tar:
            for index in range(first, min(first + SHARD_SIZE, num_samples)):
                scan = next(order, None)
                if scan is None:
                    order = iter(rng.sample(scans, len(scans)))
                    scan = next(order)
                question = ask(draw_form(rng), scan.digit, rng)
                notes = {"question": question.text, "form": question.form, "scan": scan.number}
                _add(tar, f"{index:06d}.jpg", jpeg(draw(scan, rng)))
                _add(tar, f"{index:06d}.txt", question.answer.encode())
                _add(tar, f"{index:06d}.json", json.dumps(notes).encode())
                progress()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def prepare(folder: Path) -> None:
    """Index the shards with `energon prepare`. Raises RuntimeError if that left no usable index."""
    fields = {"image": "jpg", "context": "json[question]", "answers": "txt"}
    command = [
        *(sys.executable, "-m", "megatron.energon.cli.main", "prepare", str(folder), "--non-interactive"),
        *("--split-ratio", "1,0,0", "--sample-type", "VQASample", "--field-map", json.dumps(fields)),
        *("--num-workers", "2", "--no-progress"),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    # The exit code is 0 in some cases of failure, so the files themselves are looked at.
    missing = [name for name in ("split.yaml", "dataset.yaml") if not (folder / ".nv-meta" / name).is_file()]
    if done.returncode or missing:
        raise RuntimeError(f"energon prepare {folder} failed (no {missing}):\n{done.stdout}")


def write_exam(folder: Path, scans: list[Scan]) -> None:
    """Write each held-out scan as it is (not moved or turned), and one question of every form about it."""
    folder.mkdir(parents=True)
    rng = random.Random(SPLIT_SEED + 2)
    lines = []
    for scan in scans:
        name = f"{scan.number:04d}.jpg"
        (folder / name).write_bytes(jpeg(draw(scan)))
        for form in FORMS:
            question = ask(form, scan.digit, rng)
            lines.append(json.dumps(asdict(Exam(scan.number, name, form, question.text, question.answer))))
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_exam(folder: Path) -> list[Exam]:
    """Return the questions that `write_exam` wrote."""
    lines = (folder / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [Exam(**json.loads(line)) for line in lines]


def trained_scans(folder: Path) -> set[int]:
    """Return the numbers of the scans that the samples in the shards were made from."""
    numbers = set()
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            notes = [tar.extractfile(member) for member in tar if member.name.endswith(".json")]
            numbers |= {json.load(note)["scan"] for note in notes if note is not None}
    return numbers
