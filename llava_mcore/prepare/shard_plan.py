"""The request, and the plan which rows of which files go into which shard."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from llava_mcore.config.sections.data import LIMITS, Handling, Limits, PixelRange
from llava_mcore.data.encode.assets import ASSET_FILES, Assets, load_assets
from llava_mcore.data.encode.chat_template import Lang
from llava_mcore.errors import DataError, problems
from llava_mcore.prepare.row_types import RowRange, ShuffledRows
from llava_mcore.prepare.sampling import Sampling
from llava_mcore.prepare.shuffle import BY_NUMBER, RowOffsets, ShuffledOrder
from llava_mcore.prepare.sources.base import Cuts, SourceFile
from llava_mcore.prepare.sources.detect import Opening, find_files
from llava_mcore.prepare.sources.remote_file import RemoteFolder
from llava_mcore.prepare.sources.tables import ends_hash
from llava_mcore.prepare.streamed_shards import is_streamed

FORMAT = 7
"""Incremented when other shards would be written for the same rows."""
MOST_ROWS = 1000
"""Default number of rows per shard."""
Rows = RowRange | ShuffledRows


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

    rows_per_shard: int | None = None
    """None: MOST_ROWS, or fewer if the shards for validation would not have `val_ratio` of the rows."""
    most_rows: int | None = None
    """The first rows of the source that are taken; None: all."""
    val_ratio: float = 0.0
    shuffle_seed: int | None = None
    """Seed of the order of rows; None: the order of the source."""
    counting: Counting | None = None
    pack_to: int | None = None
    """Tokens of an offline pack; None: no packing."""
    sample_multiple: int = 1
    """Multiple that lengths are rounded up to in an offline pack (data.sample_multiple)."""
    check_images: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    """Which frames of video files are kept."""
    limits: Limits = LIMITS


@dataclass(frozen=True, slots=True)
class SourcePaths:
    """Paths, or files at URLs that are read where they are, that become one folder of shards."""

    paths: tuple[Path | RemoteFolder, ...]
    how: Opening = field(default_factory=Opening)


@dataclass(frozen=True, slots=True)
class ShardList:
    """Shards of one source, by number."""

    files: tuple[SourceFile, ...]
    how: Opening
    shards: tuple[tuple[Rows, ...], ...]
    request: dict[str, Any]
    """Everything that the shards depend on, as plain containers, for comparison with an existing folder."""
    notes: tuple[str, ...] = ()
    """Parts of the source that are not read."""
    order: ShuffledOrder | None = None
    """Where shuffled rows are; its file is not written yet."""
    offsets: RowOffsets | None = None
    """Places to write into that file."""
    rows_per_shard: int | None = None
    """Rows of a shard if all files are read where they are: then `shards` is empty (`StreamedShards`)."""


@dataclass(slots=True)
class _Scans:
    """The results of reading through all files of a source."""

    segments: list[RowRange] = field(default_factory=list)
    first_rows: list[int] = field(default_factory=list)
    first_offsets: list[int] = field(default_factory=list)
    num_rows: int = 0
    known: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    offsets: RowOffsets | None = None


def make_plan(
    source: SourcePaths,
    options: Options,
    offsets_file: Path,
    on_file: Callable[[str], None] = lambda name: None,
) -> ShardList:
    """Read through all files once and divide their rows over shards.

    Shard k contains the rows [k * rows_per_shard, (k + 1) * rows_per_shard), counted over all files, in the order of
    the source or in that of `shuffle_seed`.

    Args:
        offsets_file: where the places of shuffled rows will be.
        on_file: called with the name of each file before it is read.

    Raises:
        DataError: a path is not a source, files cannot be read (all of them are listed), or there are too few shards
            for a validation split.
    """
    how = replace(source.how, most_bytes=options.limits.sample_bytes)
    names = ", ".join(path.url if isinstance(path, RemoteFolder) else str(path) for path in source.paths)
    files = [file for path in source.paths for file in find_files(path, how)]
    if options.shuffle_seed is None and all(map(is_streamed, files)):
        return _streamed_plan(files, source, options)
    scans = _scan(files, options, options.rows_per_shard or MOST_ROWS, on_file)
    if not scans.num_rows:
        raise DataError(f"{names}: there are no rows")
    rows_per_shard = options.rows_per_shard or _rows_per_shard(scans.num_rows, options.val_ratio)
    if options.val_ratio and scans.num_rows <= rows_per_shard:
        _refuse_split(names, scans.num_rows, rows_per_shard)
    # Shuffled rows have no segments; others are read through again if the shards turn out to be smaller.
    num_shards = -(-scans.num_rows // rows_per_shard)
    if scans.offsets is not None:
        firsts = range(0, scans.num_rows, rows_per_shard)
        parts = [ShuffledRows(first, min(rows_per_shard, scans.num_rows - first)) for first in firsts]
        shards: list[list[Rows]] = [[part] for part in parts]
    else:
        if rows_per_shard != (options.rows_per_shard or MOST_ROWS):
            scans = _scan(files, options, rows_per_shard, on_file)
        shards = [[] for _ in range(num_shards)]
        for segment in scans.segments:
            if segment.row < scans.num_rows:
                part = replace(segment, count=min(segment.count, scans.num_rows - segment.row))
                shards[segment.row // rows_per_shard].append(part)
    order = None
    if options.shuffle_seed is not None:
        places = (scans.first_rows, scans.first_offsets, offsets_file)
        order = ShuffledOrder(options.shuffle_seed, scans.num_rows, *places)
    request = {"sources": scans.known, "options": describe(source.how, replace(options, rows_per_shard=rows_per_shard))}
    listed = (tuple(map(tuple, shards)), request, tuple(scans.notes))
    return ShardList(tuple(files[: len(scans.first_rows)]), source.how, *listed, order, scans.offsets)


def _scan(files: Sequence[SourceFile], options: Options, rows_per_shard: int, on_file: Callable[[str], None]) -> _Scans:
    """Read through the files in turn. Rows keep their numbers over all files, so shards do not depend on who writes
    them."""
    scans, errors = _Scans(), []
    if options.shuffle_seed is not None:
        scans.offsets, rows_per_shard = RowOffsets(), 1
    for index, file in enumerate(files):
        on_file(file.name)
        before = 0 if scans.offsets is None else scans.offsets.num_rows
        try:
            scan = file.scan(Cuts(index, scans.num_rows, rows_per_shard, scans.offsets))
        except DataError as error:
            errors.append(str(error))
            continue
        if scans.offsets is None:
            scans.segments += scan.segments
        is_placed = scans.offsets is not None and scans.offsets.num_rows > before
        scans.first_rows.append(scans.num_rows)
        scans.first_offsets.append(before if is_placed else BY_NUMBER)
        scans.notes += [f"{file.name}: {note}" for note in scan.notes]
        scans.known.append({"file": file.name, "rows": scan.num_rows, "hash": scan.fingerprint})
        scans.num_rows += scan.num_rows
        if options.most_rows is not None and scans.num_rows >= options.most_rows:
            scans.num_rows = options.most_rows
            break
    # All files that cannot be read are named at once.
    if errors:
        raise DataError(errors[0] if len(errors) == 1 else problems("the source cannot be read", errors))
    return scans


def _streamed_plan(files: Sequence[SourceFile], source: SourcePaths, options: Options) -> ShardList:
    """Return a plan of files whose rows are only counted while they are read."""
    known = [{"file": file.name, "rows": None, "hash": ends_hash(file.path)} for file in filter(is_streamed, files)]
    rows_per_shard = options.rows_per_shard or MOST_ROWS
    request = {"sources": known, "options": describe(source.how, replace(options, rows_per_shard=rows_per_shard))}
    return ShardList(tuple(files), source.how, (), request, rows_per_shard=rows_per_shard)


def _rows_per_shard(num_rows: int, val_ratio: float) -> int:
    """Return rows of a shard such that one shard is at most the smaller part of a split."""
    smaller = min(val_ratio, 1 - val_ratio)
    return max(1, min(MOST_ROWS, int(num_rows * smaller))) if smaller > 0 else MOST_ROWS


def _refuse_split(names: str, num_rows: int, rows_per_shard: int) -> NoReturn:
    if num_rows == 1:
        raise DataError(f"{names}: --val-ratio needs at least two rows, but there is one; omit it")
    raise DataError(
        f"{names}: --val-ratio needs at least two shards, but the {num_rows} rows make one of {rows_per_shard}; omit "
        f"--samples-per-shard, or lower it to {max(1, num_rows // 20)}"
    )


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
        "--preference-pairs": how.keys.pairs or None,
        "--frames-fps": how.frames_fps,
        # How rows become samples and shards; None where a flag that earlier versions lack is not used.
        "--samples-per-shard": options.rows_per_shard,
        "--val-ratio": options.val_ratio,
        "--max-rows": options.most_rows,
        "--shuffle-seed": options.shuffle_seed,
        "--tokenizer-load-dir, --chat-template, --lang, --special-tokens-in-text (hash)": counting,
        "--pack-to": options.pack_to,
        "--sample-multiple": options.sample_multiple if options.sample_multiple > 1 else None,
        "--check-images": options.check_images,
        "--max-sample-bytes": options.limits.sample_bytes,
        "--max-text-chars": options.limits.text_chars,
        "--max-image-pixels": options.limits.image_pixels,
        "--max-frames": options.limits.frames,
        "--video-fps": options.sampling.fps,
        "--video-max-frames": options.sampling.max_frames,
        "--video-sampling": None if options.sampling.rule == "times" else options.sampling.rule,
    }
