"""Samples that were skipped: reported, counted over the whole run, and too many of them end it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from llava_mcore.batch_fields import PIXEL_VALUES
from llava_mcore.errors import DataError, problems
from llava_mcore.parallel.batch import HostBatch
from llava_mcore.parallel.groups import Groups, agree, sum_over_ranks

logger = logging.getLogger(__name__)

LEAST_SAMPLES = 1000
"""The rate is taken over at least this many samples, so that a broken one among the first does not end a run."""
SHOWN = 10


class LoadedBatch(HostBatch, Protocol):
    """A micro-batch that says what it holds and what was left out before it."""

    sample_keys: Sequence[str]
    skipped: Sequence[object]
    num_truncated: int
    num_pairs: int


@dataclass(frozen=True)
class Counts:
    """What one step's micro-batches hold."""

    num_tokens: int = 0
    """Pictures included, padding left out."""
    num_places: int = 0
    """Tokens with padding."""
    num_conversations: int = 0
    """Conversations that are trained on."""
    num_skipped: int = 0
    """Those that were left out."""
    num_truncated: int = 0
    """Those that were cut."""
    num_pairs: int = 0
    """Pairs of tokens that causal attention looks at."""
    num_tiles: int = 0
    """Pictures of the vision tower's size."""


def count(batches: Sequence[LoadedBatch]) -> Counts:
    """Count what this rank has loaded for one step."""
    return Counts(
        num_tokens=sum(batch.num_tokens for batch in batches),
        num_places=sum(batch.input_ids.numel() for batch in batches),
        num_conversations=sum(len(batch.sample_keys) for batch in batches),
        num_skipped=sum(len(batch.skipped) for batch in batches),
        num_truncated=sum(batch.num_truncated for batch in batches),
        num_pairs=sum(batch.num_pairs for batch in batches),
        num_tiles=sum(len(batch.media[PIXEL_VALUES]) for batch in batches),
    )


def count_all(groups: Groups, batches: Sequence[LoadedBatch]) -> Counts:
    """Count what all ranks have loaded for one step; a collective call."""
    return Counts(*sum_over_ranks(groups, list(asdict(count(batches)).values())))


@dataclass
class SkipBudget:
    """How many samples a run may leave out. The totals are those of all ranks; `last`: this rank's last skips, each
    once though a small dataset comes round again."""

    max_rate: float
    last: deque[str] = field(default_factory=lambda: deque(maxlen=SHOWN))

    def report(self, batches: Sequence[LoadedBatch]) -> None:
        """Warn about every sample that this rank has left out."""
        for skip in (skip for batch in batches for skip in batch.skipped):
            logger.warning("left out: %s", skip)
            if str(skip) in self.last:
                self.last.remove(str(skip))
            self.last.append(str(skip))

    def check(self, groups: Groups, num_used: int, num_skipped: int) -> None:
        """Raise DataError on all ranks if the run has left out too many; a collective call if so.

        Args:
            num_used, num_skipped: totals of the run, the same on all ranks.
        """
        seen = num_used + num_skipped
        if num_skipped <= self.max_rate * max(seen, LEAST_SAMPLES):
            return
        found = agree(groups, problems("left out last", list(self.last)) if self.last else None)
        title = (
            f"{num_skipped} of {seen} samples could not be used, more than data.max_skip_rate = {self.max_rate:g} "
            "(--max-skip-rate) allows; fix the data, or see --on-too-long"
        )
        raise DataError(problems(title, found), on_all_ranks=True)
