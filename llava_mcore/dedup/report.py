"""Reports of duplicates: a list, a page to look at, and names for split.yaml."""

from __future__ import annotations

import base64
import html
import io
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from llava_mcore.data.samples import ChatSample
from llava_mcore.dedup.find import Duplicate, DuplicateGroup
from llava_mcore.dedup.scan import Library
from llava_mcore.dedup.signature import SamplePlace, images_of
from llava_mcore.errors import DataError
from llava_mcore.prepare.journal import write_whole

LIST, PAGE, SHEET = "duplicates.jsonl", "duplicates.html", "duplicates.png"
SHOWN_GROUPS, SHOWN_OF_GROUP, SHOWN_CHARS = 200, 6, 300
THUMBNAIL = 160
"""Pixels of the longer side of an image on the page, and of a cell of the sheet."""
SHEET_ROWS = 40
HEAD = """<!doctype html><meta charset="utf-8"><title>Duplicates</title><style>
body { font: 14px sans-serif; margin: 2em }
section { border-top: 1px solid #ccc; padding: 1em 0; display: flex; gap: 1em }
figure { margin: 0; width: 180px }
figcaption { overflow-wrap: anywhere }
.first { font-weight: bold }
p { margin: .3em 0 }
</style>"""


def rows(groups: Sequence[DuplicateGroup], library: Library) -> list[dict[str, Any]]:
    """Return an object for each duplicate: itself, the sample that stays, and how similar they are."""
    return [
        {
            "duplicate": _named(x.place, library),
            "of": _named(group.first, library),
            "exact": x.exact,
            "text_similarity": round(x.text, 4),
            "image_difference": None if x.image is None else round(x.image, 4),
        }
        for group in groups
        for x in group.duplicates
    ]


def _named(place: SamplePlace, library: Library) -> dict[str, str]:
    return {"dataset": library.datasets[place.dataset].path, "shard": place.shard, "key": place.key}


def write_report(folder: Path, groups: Sequence[DuplicateGroup], library: Library) -> None:
    """Write the list of all duplicates, and the first groups as a page and as one image."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows(groups, library)]
    write_whole(folder / LIST, "".join(lines))
    write_whole(folder / PAGE, page(groups[:SHOWN_GROUPS], library, len(groups)))
    buffer = io.BytesIO()
    sheet(groups[:SHEET_ROWS], library).save(buffer, "PNG")
    (folder / SHEET).write_bytes(buffer.getvalue())


def page(groups: Sequence[DuplicateGroup], library: Library, total: int) -> str:
    """Return an HTML page with the samples of each group side by side, images included."""
    listed = f"the first {len(groups)} of {total}" if len(groups) < total else f"all {total}"
    parts = [HEAD, f"<h1>Duplicates</h1><p>{listed} groups; the first sample of each stays.</p>"]
    for group in groups:
        cells = [_cell(group.first, None, library)]
        cells += [_cell(x.place, x, library) for x in group.duplicates[: SHOWN_OF_GROUP - 1]]
        more = len(group.duplicates) - SHOWN_OF_GROUP + 1
        parts.append(f"<section>{''.join(cells)}{f'<p>and {more} more</p>' if more > 0 else ''}</section>")
    return "\n".join(parts)


def _cell(place: SamplePlace, duplicate: Duplicate | None, library: Library) -> str:
    chat = library.read(place)
    named = _named(place, library)
    how = "stays" if duplicate is None else "exact" if duplicate.exact else f"text {duplicate.text:.2f}"
    if duplicate is not None and not duplicate.exact and duplicate.image is not None:
        how += f", images {duplicate.image:.3f} apart"
    images = "".join(f'<img src="data:image/png;base64,{_encoded(image)}">' for image in images_of(chat)[:2])
    where = html.escape(f"{named['dataset']}: {named['shard']}, {named['key']}")
    text = html.escape(_text(chat)[:SHOWN_CHARS])
    return f'<figure>{images}<figcaption><p class="first">{how}</p><p>{where}</p><p>{text}</p></figcaption></figure>'


def _text(chat: ChatSample) -> str:
    return "\n".join(turn.text for conversation in chat.conversations for turn in conversation.turns)


def _encoded(image: Image.Image) -> str:
    small = image.convert("RGB")
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    small.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def sheet(groups: Sequence[DuplicateGroup], library: Library) -> Image.Image:
    """Return one image with a row for each group: its first sample, then its duplicates. Groups without images are left
    out."""
    lines = [[group.first, *(x.place for x in group.duplicates)][:SHOWN_OF_GROUP] for group in groups]
    images = [[images_of(library.read(place))[:1] for place in line] for line in lines]
    lines_of_images = [[cell[0] for cell in line if cell] for line in images if all(line)]
    result = Image.new("RGB", (THUMBNAIL * SHOWN_OF_GROUP, THUMBNAIL * max(1, len(lines_of_images))), "white")
    for row, line in enumerate(lines_of_images):
        for column, image in enumerate(line):
            small = image.convert("RGB")
            small.thumbnail((THUMBNAIL - 8, THUMBNAIL - 8))
            result.paste(small, (column * THUMBNAIL + 4, row * THUMBNAIL + 4))
    return result


def names_to_exclude(groups: Sequence[DuplicateGroup], library: Library) -> dict[str, list[str]]:
    """Return the names of all duplicates as split.yaml lists them, by the dataset's path."""
    names: dict[str, list[str]] = defaultdict(list)
    for group in groups:
        for x in group.duplicates:
            names[library.datasets[x.place.dataset].path].append(f"{x.place.shard}/{x.place.key}")
    return dict(names)


def exclude(names: dict[str, list[str]], split_file: str = "split.yaml") -> None:
    """Add names to the `exclude` list of each dataset's split.yaml; the shards stay as they are.

    Raises:
        DataError: a file cannot be read, a dataset is in an object store or is one file, or a name has braces, which
            energon would expand.
    """
    contents: dict[Path, str] = {}
    for dataset, added in names.items():
        if "://" in dataset or Path(dataset).is_file():
            raise DataError(
                f"{dataset} is not a folder on this machine, so nothing is excluded: leave out --exclude, and take the "
                f"samples that {LIST} lists out of it where it was made (`exclude` in its split.yaml, if it has one)"
            )
        file = Path(dataset) / ".nv-meta" / split_file
        odd = [name for name in added if set(name) & set("{}")]
        if odd:
            raise DataError(f"{dataset}: energon would expand the braces of {odd[0]!r}, so it cannot be excluded")
        try:
            content = yaml.safe_load(file.read_bytes())
            listed = list(content.get("exclude") or [])
        except (OSError, yaml.YAMLError, AttributeError, TypeError) as error:
            raise DataError(f"{file} cannot be read: {error}") from error
        content["exclude"] = [*listed, *(name for name in added if name not in set(listed))]
        contents[file] = yaml.safe_dump(content, sort_keys=False)
    for file, text in contents.items():
        write_whole(file, text)
