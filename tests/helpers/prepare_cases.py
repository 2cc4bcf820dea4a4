"""The same conversations in every format that the importer reads, and a way to read shards back."""

from __future__ import annotations

import base64
import io
import json
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from sklearn.datasets import load_digits

from llava_mcore.data.encode.conversation import TextDecoder, cook_chat
from llava_mcore.prepare.prepare_source import Result, prepare
from llava_mcore.prepare.shard_plan import Options, SourcePaths
from llava_mcore.prepare.sources.detect import Opening

DIGITS = load_digits()
MARK = "<image>"


@dataclass(frozen=True)
class Case:
    """A conversation in the form in which it is expected: (role, text) turns and images."""

    turns: tuple[tuple[str, str], ...]
    pictures: tuple[bytes, ...] = ()

    @property
    def content(self) -> dict[str, Any]:
        """What `read_back` gives of it."""
        return {"messages": [{"role": r, "content": t} for r, t in self.turns], "pictures": list(self.pictures)}


def picture(index: int, kind: str = "JPEG", size: tuple[int, int] = (24, 18), **options: Any) -> bytes:
    """One of scikit-learn's scans of handwritten digits."""
    image = Image.fromarray((DIGITS.images[index % 1797] * 15).astype("uint8")).resize(size)
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def vqa_cases(number: int) -> list[Case]:
    """One question and one answer about one image, as the plainest formats hold it."""
    return [
        Case(
            (("user", f"{MARK}\nWhich digit is image {i}?"), ("assistant", f"It is {DIGITS.target[i]}.")),
            (picture(i),),
        )
        for i in range(number)
    ]


def chat_cases() -> list[Case]:
    """System prompts, several turns, several images in several places, none at all, Japanese."""
    q, a = "user", "assistant"
    return [
        *vqa_cases(3),
        Case((("system", "Be short."), (q, "What is 1 + 1?"), (a, "2"))),
        Case(((q, f"{MARK}\n{MARK}\nWhich is larger?"), (a, "The first.")), (picture(5), picture(6, "PNG"))),
        Case(
            ((q, f"これは?\n{MARK}"), (a, "数字です。"), (q, f"{MARK}\nこれも?"), (a, "はい。\n\n- 七")),
            (picture(7), picture(8)),
        ),
        Case(((q, "Hello"), (a, "Hi."), (q, f"Look:\n{MARK}\nand?"), (a, "Nine.")), (picture(9, "WEBP"),)),
    ]


# -- writers: (folder, cases) -> what to give to `prepare` ---------------------------------------------------------


def _stored(folder: Path, case: int, number: int, data: bytes) -> str:
    """Store an image and return its path relative to folder."""
    path = folder / "pictures" / f"{case}_{number}.img"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return f"pictures/{path.name}"


def _json(path: Path, rows: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(lines if path.suffix == ".jsonl" else json.dumps(rows, indent=2), encoding="utf-8")
    return path


def llava_rows(folder: Path, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """LLaVA's format: `image` is text for one image, a list for several."""
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    rows = []
    for i, case in enumerate(cases):
        row: dict[str, Any] = {"id": i, "conversations": [{"from": names[r], "value": t} for r, t in case.turns]}
        images = [_stored(folder, i, n, data) for n, data in enumerate(case.pictures)]
        rows.append(row | ({"image": images[0] if len(images) == 1 else images} if images else {}))
    return rows


def _messages(case: Case) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in case.turns]


def _typed(case: Case, part_of: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with content in parts; part_of gives the part of the case's n-th image."""
    messages, number = [], 0
    for role, text in case.turns:
        parts: list[dict[str, Any]] = []
        for i, piece in enumerate(text.split(MARK)):
            if i:
                parts.append(part_of(number))
                number += 1
            if piece.strip("\n"):
                parts.append({"type": "text", "text": piece.strip("\n")})
        messages.append({"role": role, "content": parts})
    return messages


def write_llava(folder: Path, cases: Sequence[Case]) -> Path:
    """One JSON list."""
    return _json(folder / "llava.json", llava_rows(folder, cases))


def write_llava_lines(folder: Path, cases: Sequence[Case]) -> Path:
    """JSON lines."""
    return _json(folder / "llava.jsonl", llava_rows(folder, cases))


def write_sharegpt(folder: Path, cases: Sequence[Case]) -> Path:
    """`messages` and `images`."""
    return _json(
        folder / "sharegpt.json",
        [
            {"messages": _messages(c), "images": [_stored(folder, i, n, d) for n, d in enumerate(c.pictures)]}
            for i, c in enumerate(cases)
        ],
    )


def write_openai(folder: Path, cases: Sequence[Case]) -> Path:
    """Typed content; images in turn as path, file:// and data: URI."""
    rows = []
    for i, case in enumerate(cases):

        def part_of(number: int, i: int = i, case: Case = case) -> dict[str, Any]:
            data = case.pictures[number]
            name = _stored(folder, i, number, data)
            urls = (name, f"file://{folder / name}", f"data:image/any;base64,{base64.b64encode(data).decode()}")
            return {"type": "image_url", "image_url": {"url": urls[(i + number) % 3]}}

        rows.append({"messages": _typed(case, part_of)})
    return _json(folder / "openai.jsonl", rows)


def _table(folder: Path, cases: Sequence[Case], kind: str) -> pa.Table:
    """`messages` and `images`; images as struct{bytes, path}, bytes, or path."""
    rows = []
    for i, case in enumerate(cases):
        values: list[Any] = list(case.pictures)
        if kind == "struct":
            values = [{"bytes": data, "path": f"{n}.jpg"} for n, data in enumerate(values)]
        if kind == "path":
            values = [_stored(folder, i, n, data) for n, data in enumerate(values)]
        rows.append({"id": str(i), "messages": _messages(case), "images": values, "unused": i})
    struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    item = {"struct": struct, "bytes": pa.binary(), "path": pa.string()}[kind]
    message = pa.struct({"role": pa.string(), "content": pa.string()})
    fields = {"id": pa.string(), "messages": pa.list_(message), "images": pa.list_(item), "unused": pa.int64()}
    return pa.Table.from_pylist(rows, pa.schema(fields))


def write_parquet(folder: Path, cases: Sequence[Case], kind: str = "struct") -> Path:
    """One table in row groups that fit no shard."""
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(_table(folder, cases, kind), folder / "data.parquet", row_group_size=3)
    return folder / "data.parquet"


def write_hub(folder: Path, cases: Sequence[Case]) -> Path:
    """Tables as on the hub: two files of the part that is wanted, one of another."""
    (folder / "hub" / "data").mkdir(parents=True)
    table = _table(folder, cases, "bytes")
    for name, part in (("train-00000-of-00002", table[:2]), ("train-00001-of-00002", table[2:]), ("test-0", table)):
        pq.write_table(part, folder / "hub" / "data" / f"{name}.parquet")
    return folder / "hub"


def write_saved(folder: Path, cases: Sequence[Case]) -> Path:
    """What `datasets.DatasetDict.save_to_disk` writes."""
    part = folder / "saved" / "train"
    part.mkdir(parents=True)
    table = _table(folder, cases, "struct")
    names = [f"data-{i:05d}-of-00002.arrow" for i in range(2)]
    for name, rows in zip(names, (table[:4], table[4:]), strict=True):
        with pa.OSFile(str(part / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(rows, max_chunksize=2)
    (part / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    return folder / "saved"


def write_columns(folder: Path, cases: Sequence[Case]) -> Path:
    """Question and answer columns, with an image."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"question": c.turns[0][1].removeprefix(f"{MARK}\n"), "answers": [c.turns[1][1], "?"], "image": c.pictures[0]}
        for c in cases
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "vqa.parquet")
    return folder / "vqa.parquet"


def _triples(cases: Sequence[Case]) -> list[tuple[str, bytes]]:
    files = []
    for i, case in enumerate(cases):
        question = {"question": case.turns[0][1].removeprefix(f"{MARK}\n")}
        files += [(f"{i:03d}.jpg", case.pictures[0]), (f"{i:03d}.txt", case.turns[1][1].encode())]
        files.append((f"{i:03d}.json", json.dumps(question).encode()))
    return files


def write_triples(folder: Path, cases: Sequence[Case]) -> Path:
    """A folder of NNN.jpg, NNN.txt and NNN.json."""
    (folder / "triples").mkdir(parents=True)
    for name, data in _triples(cases):
        (folder / "triples" / name).write_bytes(data)
    return folder / "triples"


def write_tars(folder: Path, cases: Sequence[Case]) -> Path:
    """The same in two tar files."""
    (folder / "tars").mkdir(parents=True)
    files = _triples(cases)
    for number, part in enumerate((files[:6], files[6:])):
        with tarfile.open(folder / "tars" / f"{number}.tar", "w") as tar:
            for name, data in part:
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return folder / "tars"


# -- preparing and reading back ------------------------------------------------------------------------------------


class Quiet:
    """Records progress, and shows nothing."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.done = 0

    def begin(self, what: str, total: int | None) -> None:
        self.steps.append(what)

    def advance(self, number: int) -> None:
        self.done += number


def make(src: Path, out: Path, options: Options | None = None, how: Opening | None = None, **settings: Any) -> Result:
    """Prepare one source in this process, four rows per shard."""
    source = SourcePaths((src,), how or Opening())
    return prepare(source, out, options or Options(rows_per_shard=4), Quiet(), **settings)


def read_back(folder: Path) -> list[dict[str, Any]]:
    """Return what training reads of the shards: messages and images, and what the json says besides."""
    found = []
    for path in sorted(folder.glob("*.tar")):
        samples: dict[str, dict[str, Any]] = {}
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, part = member.name.partition(".")
                file = tar.extractfile(member)
                assert file is not None
                samples.setdefault(key, {})[part] = file.read()
        for key, parts in samples.items():
            sample = TextDecoder()({"__key__": key, "__restore_key__": (), **parts})
            chat = cook_chat(sample)
            abouts = sample["json"].get("pack", [sample["json"]])
            for conversation, about in zip(chat.conversations, abouts, strict=True):
                messages = [{"role": t.role, "content": t.text} for t in conversation.turns]
                extra = {k: v for k, v in about.items() if k != "messages"}
                found.append({"messages": messages, "pictures": list(conversation.images), "key": key, **extra})
    return found


def contents(folder: Path) -> list[dict[str, Any]]:
    """Messages and images only."""
    return [{"messages": s["messages"], "pictures": s["pictures"]} for s in read_back(folder)]


def shard_bytes(folder: Path) -> dict[str, bytes]:
    """Every shard's bytes."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.tar"))}
