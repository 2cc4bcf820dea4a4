"""Writes one shard, from its rows to its tar file, in a process of the importer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.encode.marks import count_marks, escape
from llava_mcore.data.encode.record_keys import ROW
from llava_mcore.data.encode.tokens import TextTokens, digest_of, to_json
from llava_mcore.data.loader.packing import best_fit, round_up
from llava_mcore.data.samples import AUDIO_MARK, IMAGE_MARK, VIDEO_MARK
from llava_mcore.prepare.counts import PrepareCounts, ShardReport
from llava_mcore.prepare.media.audios import read_audio
from llava_mcore.prepare.media.images import read_image
from llava_mcore.prepare.media.item_options import resizing_for
from llava_mcore.prepare.media.videos import read_video
from llava_mcore.prepare.output.sample_tokens import as_trained, check_amount, check_draft, tokens_of
from llava_mcore.prepare.output.tar_file import ShardWriter
from llava_mcore.prepare.record_layouts import check_turns, parse
from llava_mcore.prepare.record_pairs import parse_pair, refuse_pair
from llava_mcore.prepare.record_parts import place_marks
from llava_mcore.prepare.row_types import (
    FILLED,
    MISCOUNTED,
    THOUGHTLESS,
    AudioFile,
    BadSample,
    CheckedConversation,
    Draft,
    ImageFile,
    OtherAnswer,
    Reason,
    RowRange,
    ShuffledRows,
    Skipped,
    SourceRow,
    VideoFrames,
)
from llava_mcore.prepare.shard_plan import Options, Rows
from llava_mcore.prepare.shuffle import ShuffledOrder
from llava_mcore.prepare.sources.base import RowReader
from llava_mcore.prepare.sources.detect import Opening

LONGEST_ID, LONGEST_DETAIL = 200, 4000


@dataclass(frozen=True, slots=True)
class ShardSetup:
    """Settings for the shards of a source, sent to every process."""

    files: tuple[RowReader, ...]
    how: Opening
    options: Options
    folder: Path
    """Folder of finished shards."""
    scratch: Path
    """Folder of unfinished shards, on the same file system."""
    order: ShuffledOrder | None = None
    """Where shuffled rows are."""


class ShardMaker:
    """Writes shards of one source."""

    def __init__(self, setup: ShardSetup, assets: Assets | None, on_row: Callable[[], None] = lambda: None) -> None:
        """assets: for counting tokens; None: do not count. on_row: called for every row."""
        self._setup = setup
        self._assets = assets
        self._resizing = resizing_for(assets)
        self._on_row = on_row

    def make(self, shard: int, segments: Sequence[Rows]) -> ShardReport:
        """Write a shard and return its report; rows that cannot become samples are skipped.

        Raises DataError if the source can no longer be read, OSError if the shard cannot be written.
        """
        counts, skipped = PrepareCounts(), list[Skipped]()
        name = f"{shard:06d}.tar"
        temporary = self._setup.scratch / f"{name}.{os.getpid()}.part"  # a process of a killed run may still be writing
        with ShardWriter(temporary, self._setup.folder / name) as writer:
            conversations = self._conversations(segments, counts, skipped)
            if self._setup.options.pack_to is None:
                for conversation in conversations:
                    writer.add(conversation)
            else:
                _write_packs(writer, list(conversations), self._setup.options)
            sha256 = writer.finish() if writer.num_entries else ""
            counts.entries = writer.num_entries
            counts.bytes = writer.num_bytes if writer.num_entries else 0
        return ShardReport(shard, name if sha256 else None, sha256, counts, tuple(skipped))

    def _conversations(
        self, segments: Sequence[Rows], counts: PrepareCounts, skipped: list[Skipped]
    ) -> Iterator[CheckedConversation]:
        """Yield the good rows as conversations, counted; the others go to `skipped`."""
        for segment in self._ranges(segments):
            file = self._setup.files[segment.file]
            for row in islice(file.read(segment), segment.count):  # less than its bytes have, with --max-rows
                self._on_row()
                counts.rows += 1
                try:
                    drafts = self._drafts(row, counts)
                    conversation = self._conversation(file, row, drafts, segment.row + row.index - segment.index)
                except BadSample as bad:
                    skipped.append(
                        Skipped(
                            file.name, row.index, _id_of(row), bad.reason.value, _clean(bad.detail[:LONGEST_DETAIL])
                        )
                    )
                    counts.reasons[bad.reason.value] += 1
                    counts.roles.update([bad.value] if bad.reason is Reason.UNKNOWN_ROLE else [])
                else:
                    counts.add(conversation)
                    yield conversation

    def _ranges(self, segments: Sequence[Rows]) -> Iterator[RowRange]:
        for segment in segments:
            if isinstance(segment, ShuffledRows):
                assert self._setup.order is not None
                yield from self._setup.order.rows(segment)
            else:
                yield segment

    def _drafts(self, row: SourceRow, counts: PrepareCounts) -> tuple[Draft, ...]:
        """Return the parsed row, which is two if it is a preference pair. Keys that nothing reads are counted, also if
        the row is skipped later."""
        if isinstance(row.data, BadSample):
            raise row.data
        how = self._setup.how
        untaken = () if self._assets is None else self._assets.chat.literal_marks
        drafts: tuple[Draft, ...]
        if how.keys.pairs:
            drafts = parse_pair(row.data, how.keys, how.layout, untaken)
        else:
            refuse_pair(row.data)
            drafts = (parse(row.data, how.keys, how.layout, untaken),)
        counts.typed.update(mark for mark in untaken if any(count_marks(d.turns, escape(mark)) for d in drafts))
        counts.unused.update((*drafts[0].unused, *ROW.unused(dict.fromkeys(row.unread, True))))
        drafts = tuple(map(place_marks, drafts))
        for draft in drafts:
            check_turns(draft.turns)
            check_draft(draft.turns, self._setup.options.limits)
        return drafts

    def _conversation(
        self, file: RowReader, row: SourceRow, drafts: Sequence[Draft], index: int
    ) -> CheckedConversation:
        how, options = self._setup.how, self._setup.options
        draft, *others = drafts
        self._require_media_to_be_taken(draft)
        # Media are read whole, so that a broken file skips the row here and not in training.
        images = tuple(
            read_image(image, file.folder, decode=options.check_images, limits=options.limits, resizing=self._resizing)
            for image in draft.images
        )
        audios = tuple(
            read_audio(audio, file.folder, options.limits, decode=options.check_images) for audio in draft.audios
        )
        videos = tuple(
            read_video(
                video,
                file.folder,
                options.sampling,
                options.limits,
                frames_fps=how.frames_fps,
                decode=options.check_images,
            )
            for video in draft.videos
        )
        check_amount(images, videos, audios, options.limits)
        # Tokens are counted as in training, with the same functions.
        num_tokens, text = tokens_of(self._assets, as_trained(draft, images, videos, audios))
        # --pack-to is a multiple of --sample-multiple, so that rounding does not exceed it.
        if options.pack_to is not None and num_tokens is not None and num_tokens > options.pack_to:
            raise BadSample(Reason.TOO_LONG, f"{num_tokens} tokens; a pack has {options.pack_to}")
        source = {"file": _clean(file.name), "index": row.index, "id": _id_of(row)}
        return CheckedConversation(
            index,
            draft.turns,
            images,
            num_tokens,
            self._stored(draft, text),
            source,
            () if text is None else text.typed,
            videos,
            audios,
            draft.tools,
            self._notes(draft, text, videos),
            self._rejected(others[0], images, videos, audios) if others else None,
        )

    def _rejected(
        self, draft: Draft, images: Sequence[ImageFile], videos: Sequence[VideoFrames], audios: Sequence[AudioFile]
    ) -> OtherAnswer:
        num_tokens, text = tokens_of(self._assets, as_trained(draft, images, videos, audios))
        return OtherAnswer(draft.turns, num_tokens, self._stored(draft, text))

    def _stored(self, draft: Draft, text: TextTokens | None) -> Mapping[str, Any] | None:
        if self._assets is None or text is None:
            return None
        return to_json(text, self._assets.chat.fingerprint, digest_of(draft.turns, draft.tools))

    def _notes(self, draft: Draft, text: TextTokens | None, videos: Sequence[VideoFrames]) -> tuple[str, ...]:
        notes = [MISCOUNTED] if any(video.header_problem is not None for video in videos) else []
        if self._assets is not None and text is not None:
            notes += [FILLED] if text.num_filled else []
            notes += [THOUGHTLESS] if self._assets.chat.features.loses_reasoning(draft.turns) else []
        return tuple(notes)

    def _require_media_to_be_taken(self, draft: Draft) -> None:
        """Raise BadSample for media that training would refuse, before any file is read."""
        refused = {} if self._assets is None else self._assets.refused
        for mark, media, reason in (
            (IMAGE_MARK, draft.images, Reason.NO_IMAGES),
            (VIDEO_MARK, draft.videos, Reason.NO_VIDEOS),
            (AUDIO_MARK, draft.audios, Reason.NO_AUDIOS),
        ):
            if media and mark in refused:
                raise BadSample(reason, refused[mark])


def _write_packs(writer: ShardWriter, conversations: list[CheckedConversation], options: Options) -> None:
    assert options.pack_to is not None
    lengths = [round_up(conversation.num_tokens or 0, options.sample_multiple) for conversation in conversations]
    for pack in best_fit(lengths, options.pack_to):
        writer.add_pack([conversations[i] for i in pack])


def _id_of(row: SourceRow) -> str:
    """Return the row's id; '' if it has none."""
    row_id = None if isinstance(row.data, BadSample) else row.data.get("id")
    return "" if row_id is None else _clean(str(row_id))[:LONGEST_ID]


def _clean(text: str) -> str:
    """Return text that can be encoded as UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")
