"""How the small datasets of `bad_data` are made: good ones, and good ones with one change."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator
from PIL import Image

SEQ_LENGTH = 64
FAULTY = 2
NUM_SAMPLES = 4
CRUDE = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
VQA = (
    "sample_type:\n  __module__: megatron.energon\n  __class__: VQASample\n"
    "field_map:\n  image: jpg\n  context: json[question]\n  answers: txt\n"
)

Parts = dict[str, bytes | str | list[Any] | dict[str, Any] | None]


@dataclass(frozen=True)
class BadData:
    """One kind of bad input.

    Attributes:
        make: writes the data into an empty folder and returns the data path.
        kind: skip: training leaves the sample out and counts it; stop: it ends with an error; fine: it is trained on.
        text: a regular expression found in the reason or the error, in training and in the report of `check`; for what
            is fine, in that report only (empty: it has nothing to say).
        where: start: before the first batch; training: when the data are read.
        packing: trained with --packing.
        ranks: data-parallel ranks, of which the last one reads; `check` does not know them.
    """

    name: str
    make: Callable[[Path], Path]
    kind: Literal["skip", "stop", "fine"]
    text: str = ""
    where: Literal["start", "training"] = "training"
    packing: bool = False
    ranks: int = 1


# -- samples and shards ----------------------------------------------------------------------------------------------


def picture(kind: str = "JPEG", mode: str = "RGB", size: tuple[int, int] = (40, 30), **options: Any) -> bytes:
    """A gradient, so that no part of the file is trivial."""
    image = Image.linear_gradient("L").resize(size).convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def messages(*turns: tuple[Any, Any]) -> dict[str, Any]:
    """The json of a sample, one (role, content) per turn."""
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


ASKED = ("user", "<image>\nWhat is this?")
ANSWERED = ("assistant", "A gray ramp.")
GOOD: Parts = {"json": messages(ASKED, ANSWERED), "0.jpg": picture()}


def write_tar(path: Path, samples: Mapping[str, Parts]) -> Path:
    """Write key -> parts; a part that is None is omitted, one that is neither text nor bytes becomes JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for key, parts in samples.items():
            for name, part in parts.items():
                if part is None:
                    continue
                text = part if isinstance(part, (bytes, str)) else json.dumps(part)
                data = text.encode() if isinstance(text, str) else text
                info = tarfile.TarInfo(f"{key}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


def index(folder: Path, dataset_yaml: str = CRUDE) -> Path:
    """Prepare a folder as `energon prepare` does. AssertionError or SystemExit where that refuses."""
    names = sorted(path.name for path in folder.glob("*.tar"))
    with contextlib.redirect_stdout(io.StringIO()):
        WebdatasetPreparator.prepare_dataset(folder, names, split_parts_ratio=[("train", 1.0)], workers=1)
    (folder / ".nv-meta" / "dataset.yaml").write_text(dataset_yaml, encoding="utf-8")
    return folder


def good(folder: Path, *, shards: int = 1) -> Path:
    """A dataset without fault."""
    for shard in range(shards):
        write_tar(folder / f"{shard:06d}.tar", {f"{shard}{i:05d}": GOOD for i in range(NUM_SAMPLES)})
    return index(folder)


def one_sample(parts: Parts, *, base: Parts = GOOD, dataset_yaml: str = CRUDE) -> Callable[[Path], Path]:
    """Four samples, of which one has other parts."""

    def make(folder: Path) -> Path:
        samples = {f"{i:06d}": base | parts if i == FAULTY else base for i in range(NUM_SAMPLES)}
        write_tar(folder / "000000.tar", samples)
        return index(folder, dataset_yaml)

    return make


def said(*turns: tuple[Any, Any], images: int = 0) -> Callable[[Path], Path]:
    """Four samples, of which one has other turns and this number of images."""
    pictures: Parts = {f"{i}.jpg": picture() for i in range(images)}
    return one_sample({"0.jpg": None, "json": messages(*turns)} | pictures)


def pictured(data: bytes, part: str = "0.jpg") -> Callable[[Path], Path]:
    """Four samples, of which one has another image."""
    return one_sample({"0.jpg": None, part: data})


def changed(change: Callable[[Path], Any], *, shards: int = 2) -> Callable[[Path], Path]:
    """A good dataset that is changed after it was prepared."""

    def make(folder: Path) -> Path:
        change(good(folder, shards=shards))
        return folder

    return make


def rewritten(name: str, text: str | bytes) -> Callable[[Path], Path]:
    """A good dataset with another text in one of its files."""

    def change(folder: Path) -> None:
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)

    return changed(change)


def removed(name: str) -> Callable[[Path], Path]:
    """A good dataset without one of its files."""
    return changed(lambda folder: (folder / name).unlink())
