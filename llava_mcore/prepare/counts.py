"""Counts of a shard's samples and skipped rows, added up by the main process."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from llava_mcore.plan.dataset import BINS_PER_OCTAVE, EARLIER_NAMES
from llava_mcore.prepare.row_types import CheckedConversation, Skipped

COUNTERS = ("reasons", "typed", "roles", "unused", "notes", "miscounted")
"""Fields of `PrepareCounts` that count by name."""


def bin_of(value: int) -> int:
    """Return the bin of a number >= 1; bin b starts at 2 ** (b / BINS_PER_OCTAVE)."""
    return math.floor(math.log2(max(1, value)) * BINS_PER_OCTAVE)


@dataclass
class Histogram:
    """Counts by bins, with exact number, sum and maximum."""

    bins: Counter[int] = field(default_factory=Counter)
    count: int = 0
    total: int = 0
    largest: int = 0

    def add(self, value: int) -> None:
        """Count a number >= 1."""
        self.bins[bin_of(value)] += 1
        self.count, self.total, self.largest = self.count + 1, self.total + value, max(self.largest, value)

    def merge(self, other: Histogram) -> None:
        """Add another one's counts."""
        self.bins.update(other.bins)
        self.count, self.total = self.count + other.count, self.total + other.total
        self.largest = max(self.largest, other.largest)

    def to_json(self) -> dict[str, Any]:
        """Return plain containers."""
        bins = sorted(self.bins.items())
        return {"bins": bins, "number": self.count, "total": self.total, "largest": self.largest}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of to_json."""
        return cls(Counter(dict(map(tuple, data["bins"]))), data["number"], data["total"], data["largest"])


@dataclass
class PrepareCounts:
    """Counts of one shard, one source or everything."""

    rows: int = 0
    """Rows that were read: samples and skipped ones."""
    conversations: int = 0
    entries: int = 0
    """Samples of the shards: conversations, or packs of them."""
    images: int = 0
    videos: int = 0
    frames: int = 0
    without_fps: int = 0
    """Videos that do not say how many frames belong to a second."""
    audios: int = 0
    audio_seconds: int = 0
    """Seconds of all audio clips, each rounded to a whole number."""
    bytes: int = 0
    """Size of the shards in bytes."""
    tokens: Histogram = field(default_factory=Histogram)
    """Tokens of each conversation."""
    sides: Histogram = field(default_factory=Histogram)
    """Longer side of each image and frame in pixels."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Skipped rows by reason."""
    typed: Counter[str] = field(default_factory=Counter)
    """Conversations by the special tokens in their text."""
    roles: Counter[str] = field(default_factory=Counter)
    """Skipped rows by the unknown role in them."""
    unused: Counter[str] = field(default_factory=Counter)
    """Rows by the keys in them that nothing reads."""
    notes: Counter[str] = field(default_factory=Counter)
    """Conversations by their notes (`row_types.FILLED`, …)."""
    miscounted: Counter[str] = field(default_factory=Counter)
    """The first row of each shard with a video file whose header has a wrong number of frames, and these numbers."""

    @property
    def skipped(self) -> int:
        """Skipped rows."""
        return self.reasons.total()

    @property
    def skip_rate(self) -> float:
        """Fraction of the rows that was skipped, from 0 to 1."""
        return self.skipped / self.rows if self.rows else 0.0

    def add(self, conversation: CheckedConversation) -> None:
        """Count a conversation that was written."""
        self.conversations += 1
        self.images += len(conversation.images)
        self.videos += len(conversation.videos)
        self.frames += sum(len(video.frames) for video in conversation.videos)
        self.without_fps += sum(video.fps is None for video in conversation.videos)
        self.audios += len(conversation.audios)
        self.audio_seconds += sum(round(audio.seconds) for audio in conversation.audios)
        self.typed.update(conversation.typed)
        self.notes.update(conversation.notes)
        problem = next((video.header_problem for video in conversation.videos if video.header_problem), None)
        if problem is not None and not self.miscounted:
            self.miscounted[f"{conversation.source['file']}, row {conversation.source['index']}: {problem}"] = 1
        frames = (frame for video in conversation.videos for frame in video.frames)
        for image in (*conversation.images, *frames):
            self.sides.add(max(image.size))
        if conversation.num_tokens is not None:
            self.tokens.add(conversation.num_tokens)
        if conversation.rejected is not None and conversation.rejected.num_tokens is not None:
            self.tokens.add(conversation.rejected.num_tokens)

    def merge(self, other: PrepareCounts) -> None:
        """Add another one's counts."""
        self.rows, self.conversations = self.rows + other.rows, self.conversations + other.conversations
        self.entries, self.images = self.entries + other.entries, self.images + other.images
        self.videos, self.frames = self.videos + other.videos, self.frames + other.frames
        self.without_fps += other.without_fps
        self.audios, self.audio_seconds = self.audios + other.audios, self.audio_seconds + other.audio_seconds
        self.bytes += other.bytes
        self.tokens.merge(other.tokens)
        self.sides.merge(other.sides)
        for name in COUNTERS:
            vars(self)[name].update(vars(other)[name])

    def to_json(self) -> dict[str, Any]:
        """Return plain containers."""
        fields = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        return fields | {
            "tokens": self.tokens.to_json(),
            "sides": self.sides.to_json(),
            **{name: dict(sorted(vars(self)[name].items())) for name in COUNTERS},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of to_json."""
        histograms = {name: Histogram.from_json(data[name]) for name in ("tokens", "sides")}
        counters = {name: Counter(data.get(name, {})) for name in COUNTERS}
        fields = {EARLIER_NAMES.get(name, name): value for name, value in data.items()}
        return cls(**{**fields, **histograms, **counters})


@dataclass(frozen=True)
class ShardReport:
    """The results for the rows of one shard."""

    shard: int
    name: str | None
    """The tar file; None if nothing was left to write."""
    sha256: str
    counts: PrepareCounts
    skipped: tuple[Skipped, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain containers."""
        skipped = [line.to_json() for line in self.skipped]
        return {
            "shard": self.shard,
            "name": self.name,
            "sha256": self.sha256,
            "counts": self.counts.to_json(),
            "skipped": skipped,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of to_json."""
        skipped = tuple(Skipped(**line) for line in data["skipped"])
        return cls(data["shard"], data["name"], data["sha256"], PrepareCounts.from_json(data["counts"]), skipped)


def add_up(counts: Iterable[PrepareCounts]) -> PrepareCounts:
    """Return the sum."""
    total = PrepareCounts()
    for part in counts:
        total.merge(part)
    return total
