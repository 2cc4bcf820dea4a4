"""Summarizes samples: counts, lengths and groups of problems, in memory that does not grow with the data."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass, field

from llava_mcore.check_data.finding import Finding
from llava_mcore.data.loader.packing import LEVELS, PatchBudget, levels_of, online_fill

EXAMPLES = 3
VALUES = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")
DRAWN = 2048
"""Number of lengths that are packed to estimate how full packs will be."""


@dataclass
class Group:
    """Samples with the same problem, ignoring numbers and quotes in its message."""

    level: str
    """left out, stop or remark."""
    reason: str
    """The message for the first of them."""
    count: int = 0
    examples: list[tuple[str, str, str]] = field(default_factory=list)
    """Dataset, shard and key of the first ones."""


@dataclass
class DatasetTally:
    """One dataset's samples."""

    path: str
    share: str
    repeats: float | None
    num_shards: int
    num_samples: int
    num_seen: int = 0
    """Conversations checked."""
    num_left_out: int = 0
    num_excluded: int = 0
    num_tokens: int = 0
    num_images: int = 0
    num_videos: int = 0
    num_frames: int = 0
    num_audios: int = 0

    @property
    def num_used(self) -> int:
        """Checked conversations that training would use."""
        return self.num_seen - self.num_left_out

    def per_sample(self, total: int) -> float:
        """Scale a total over the checked samples to all samples of the dataset."""
        return total * self.num_samples / max(1, self.num_seen + self.num_excluded)


@dataclass
class Tally:
    """All datasets' samples."""

    datasets: list[DatasetTally]
    most_patches: int | None = None
    """Patches that a pack may have, its second budget; None: any number."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Tokens of a sample -> number of samples, those that are too long included."""
    patches: Counter[int] = field(default_factory=Counter)
    """Patches of a sample (`MediaPlan.unit`) -> number of samples, those with too many included."""
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Tokens of a sample and its steps of the second budget -> number of samples. Steps take less memory than patches,
    and packing does not know more."""
    images: Counter[int] = field(default_factory=Counter)
    """Images of a sample -> number of samples."""
    videos: Counter[int] = field(default_factory=Counter)
    """Videos of a sample -> number of samples."""
    frames: Counter[int] = field(default_factory=Counter)
    """Frames of a video -> number of videos."""
    audios: Counter[int] = field(default_factory=Counter)
    """Audio clips of a sample -> number of samples."""
    num_without_fps: int = 0
    """Videos whose fps is assumed."""
    unused: Counter[str] = field(default_factory=Counter)
    """Samples by the keys of their json that nothing reads."""
    groups: dict[tuple[str, str], Group] = field(default_factory=dict)
    num_looked_at: int = 0
    """Samples; a pack counts once."""
    num_packs: int = 0
    """Samples of several conversations."""
    examples: list[Finding] = field(default_factory=list)
    """Samples without any problem, for showing: of as many kinds as possible, else the first ones."""

    def add(self, finding: Finding, *, num_examples: int) -> None:
        """Count one sample; keep it if it is among the num_examples to show."""
        data = self.datasets[finding.dataset]
        self.num_looked_at += 1
        if finding.status == "excluded":
            data.num_excluded += 1
            return
        # Reasons count for left-out samples too, sizes for all whose size is known.
        level = "stop" if finding.status == "stop" else "left out"
        for level_, reasons in ((level, finding.reasons), ("remark", finding.remarks)):
            for reason in reasons:
                self._note(level_, reason, finding)
        data.num_seen += finding.num_conversations
        data.num_left_out += len(finding.reasons)
        if finding.num_tokens:
            self.lengths[finding.num_tokens] += 1
            self.patches[finding.num_patches] += 1
            steps = 0 if self.most_patches is None else levels_of(finding.num_patches, self.most_patches)
            self.sizes[finding.num_tokens, steps] += 1
        if finding.status != "used":
            return
        # Only what training uses.
        self.num_packs += finding.num_conversations > 1
        self.images[finding.num_images] += 1
        self.videos[len(finding.num_frames)] += 1
        self.frames.update(finding.num_frames)
        self.num_without_fps += finding.num_without_fps
        self.audios[finding.num_audios] += 1
        self.unused.update(finding.unused)
        data.num_tokens += finding.num_tokens
        data.num_images += finding.num_images
        data.num_videos += len(finding.num_frames)
        data.num_frames += sum(finding.num_frames)
        data.num_audios += finding.num_audios
        if not finding.reasons and not finding.remarks:
            self._keep(finding, num_examples)

    def _keep(self, finding: Finding, num_examples: int) -> None:
        """Keep a sample to show: there is room, or it is of a new kind and another kind has several."""
        if len(self.examples) >= num_examples:
            kinds = [example.kind for example in self.examples]
            repeated = [i for i, kind in enumerate(kinds) if kind in kinds[:i]]
            if finding.kind in kinds or not repeated:
                return
            del self.examples[repeated[-1]]
        self.examples.append(finding)

    def _note(self, level: str, reason: str, finding: Finding) -> None:
        group = self.groups.setdefault((level, VALUES.sub("…", reason)), Group(level, reason))
        group.count += 1
        if len(group.examples) < EXAMPLES:
            group.examples.append((self.datasets[finding.dataset].path, finding.shard, finding.key))

    @property
    def num_seen(self) -> int:
        """Conversations checked."""
        return sum(data.num_seen for data in self.datasets)

    @property
    def num_left_out(self) -> int:
        """Conversations that training would skip or end at."""
        return sum(data.num_left_out for data in self.datasets)

    def problems(self, level: str) -> list[Group]:
        """Return the groups of one level, the largest first."""
        return sorted((g for g in self.groups.values() if g.level == level), key=lambda g: -g.count)


def quantile(counts: Counter[int], part: float) -> int:
    """Return the smallest value that at least this fraction of all do not exceed; 0 if there are none."""
    target, seen = part * counts.total(), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= target:
            return value
    return 0


def bins(counts: Counter[int], num_bins: int) -> list[tuple[int, int, int]]:
    """Return (first, last, count) of `num_bins` ranges of equal width over all values, including empty ones."""
    if not counts:
        return []
    low, high = min(counts), max(counts)
    width = max(1, -(-(high - low + 1) // num_bins))
    totals = [0] * -(-(high - low + 1) // width)
    for value, count in counts.items():
        totals[(value - low) // width] += count
    return [(low + i * width, low + (i + 1) * width - 1, count) for i, count in enumerate(totals)]


def fitting(sizes: Counter[tuple[int, int]], seq_length: int) -> Counter[tuple[int, int]]:
    """Return the samples that keep to both budgets of a pack."""
    return Counter({size: count for size, count in sizes.items() if size[0] <= seq_length and size[1] <= LEVELS})


def expected_fill(
    sizes: Counter[tuple[int, int]], seq_length: int, buffer_size: int, *, multiple: int = 1
) -> float | None:
    """Return how full the packs of such samples will be, from 0 to 1; None if none fits.

    A stream of samples is drawn with their frequencies, and packed as in the loader.

    Args:
        sizes: `Tally.sizes`.
        multiple: multiple that lengths are rounded up to.
    """
    usable = fitting(sizes, seq_length)
    if not usable:
        return None
    values = sorted(usable)
    drawn = random.Random(0).choices(values, [usable[value] for value in values], k=DRAWN)
    media = PatchBudget([steps for _, steps in drawn], LEVELS)
    lengths = [length for length, _ in drawn]
    return online_fill(lengths, seq_length, buffer_size, media, multiple=multiple)
