"""The request, and the plan which rows of which files go into which shard."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llava_mcore.config.sections.data import LIMITS, Handling, Limits, PixelRange
from llava_mcore.data.encode.assets import ASSET_FILES, Assets, load_assets
from llava_mcore.data.encode.chat_template import Lang
from llava_mcore.errors import DataError, problems
from llava_mcore.prepare.row_types import RowRange
from llava_mcore.prepare.sampling import Sampling
from llava_mcore.prepare.sources.base import Cuts, SourceFile
from llava_mcore.prepare.sources.detect import Opening, find_files

FORMAT = 7
"""Incremented when other shards would be written for the same rows."""


@dataclass(frozen=True, slots=True)
class Counting:
    """The tokenizer and chat template that count the tokens, as in training."""

    hf_dir: Path
    chat_template: str | None = None
    """A name or a .jinja file; None: the folder's own."""
    lang: Lang | None = None
    """Selects the template if the folder has none."""
    special_tokens_in_text: Handling = "text"
    pixels: PixelRange = field(default_factory=PixelRange)
    video_pixels: PixelRange = field(default_factory=PixelRange)

    def load(self) -> Assets:
        """Load them; every process does so once. LlavaMcoreError if something is missing."""
        return load_assets(
            self.hf_dir,
            chat_template=self.chat_template,
            lang=self.lang,
            special_tokens_in_text=self.special_tokens_in_text,
            pixels=self.pixels,
            video_pixels=self.video_pixels,
        )

    def fingerprint(self) -> str:
        """Return a hash of everything that tokens and their number depend on."""
        sha = hashlib.sha256(f"{self.chat_template} {self.lang} {self.special_tokens_in_text}".encode())
        if self.pixels != PixelRange():
            sha.update(repr(self.pixels).encode())
        if self.video_pixels != PixelRange():
            sha.update(f"video {self.video_pixels!r}".encode())
        if self.chat_template is not None and Path(self.chat_template).is_file():
            sha.update(Path(self.chat_template).read_bytes())
        for name in ASSET_FILES:
            if (self.hf_dir / name).is_file():
                sha.update(name.encode() + b"\0" + (self.hf_dir / name).read_bytes())
        return sha.hexdigest()


@dataclass(frozen=True, slots=True)
class Options:
    """How rows become shards. All options change the shards, so they must be the same in a rerun."""

    rows_per_shard: int = 1000
    val_ratio: float = 0.0
    counting: Counting | None = None
    pack_to: int | None = None
    """Tokens of an offline pack; None: no packing."""
    check_images: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    """Which frames of video files are kept."""
    limits: Limits = LIMITS


@dataclass(frozen=True, slots=True)
class SourcePaths:
    """Paths that become one folder of shards."""

    paths: tuple[Path, ...]
    how: Opening = field(default_factory=Opening)


@dataclass(frozen=True, slots=True)
class ShardList:
    """Shards of one source, by number."""

    files: tuple[SourceFile, ...]
    how: Opening
    shards: tuple[tuple[RowRange, ...], ...]
    num_rows: int
    request: dict[str, Any]
    """Everything that the shards depend on, as plain containers, for comparison with an existing folder."""
    notes: tuple[str, ...] = ()
    """Parts of the source that are not read."""


def make_plan(source: SourcePaths, options: Options, on_file: Callable[[str], None] = lambda name: None) -> ShardList:
    """Read through all files once and divide their rows over shards.

    Shard k contains the rows [k * rows_per_shard, (k + 1) * rows_per_shard), counted over all files.

    Args:
        on_file: called with the name of each file before it is read.

    Raises:
        DataError: a path is not a source, files cannot be read (all of them are listed), or there are too few shards
            for a validation split.
    """
    how = replace(source.how, most_bytes=options.limits.sample_bytes)
    files = [file for path in source.paths for file in find_files(path, how)]
    # Scan the files in turn. Rows keep their numbers over all files, so shards do not depend on who writes them.
    shards: list[list[RowRange]] = []
    known, notes, errors, first_row = [], [], [], 0
    for index, file in enumerate(files):
        on_file(file.name)
        try:
            scan = file.scan(Cuts(index, first_row, options.rows_per_shard))
        except DataError as error:
            errors.append(str(error))
            continue
        notes += [f"{file.name}: {note}" for note in scan.notes]
        for segment in scan.segments:
            shard = segment.row // options.rows_per_shard
            shards += [[] for _ in range(shard + 1 - len(shards))]
            shards[shard].append(segment)
        known.append({"file": file.name, "rows": scan.num_rows, "hash": scan.fingerprint})
        first_row += scan.num_rows
    # All files that cannot be read are named at once.
    if errors:
        raise DataError(errors[0] if len(errors) == 1 else problems("the source cannot be read", errors))
    if not first_row:
        raise DataError(f"{', '.join(map(str, source.paths))}: there are no rows")
    if options.val_ratio and len(shards) < 2:
        raise DataError(
            f"{', '.join(map(str, source.paths))}: --val-ratio needs at least two shards, but the {first_row} rows "
            f"make one of {options.rows_per_shard}; lower --samples-per-shard, for example to {max(1, first_row // 20)}"
        )
    request = {"sources": known, "options": describe(source.how, options)}
    return ShardList(tuple(files), source.how, tuple(map(tuple, shards)), first_row, request, tuple(notes))


def describe(how: Opening, options: Options) -> dict[str, Any]:
    """Return the options by the names of their flags, the tokenizer by its hash."""
    counting = None if options.counting is None else options.counting.fingerprint()
    return {
        "version": FORMAT,
        "--format": how.format,
        "--image-dir": None if how.image_dir is None else str(how.image_dir),
        "--source-split": how.split,
        "--image-key": how.keys.image,
        "--video-key": how.keys.video,
        "--audio-key": how.keys.audio,
        "--question-key": how.keys.question,
        "--answer-key": how.keys.answer,
        "--captions": how.keys.captions,
        "--frames-fps": how.frames_fps,
        "--samples-per-shard": options.rows_per_shard,
        "--val-ratio": options.val_ratio,
        "--tokenizer-load-dir, --chat-template, --lang, --special-tokens-in-text (hash)": counting,
        "--pack-to": options.pack_to,
        "--check-images": options.check_images,
        "--max-sample-bytes": options.limits.sample_bytes,
        "--max-text-chars": options.limits.text_chars,
        "--max-picture-pixels": options.limits.picture_pixels,
        "--max-frames": options.limits.frames,
        "--video-fps": options.sampling.fps,
        "--video-max-frames": options.sampling.max_frames,
    }
