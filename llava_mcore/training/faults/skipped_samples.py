"""Skipped samples: they are reported, counted over the whole run, and too many of them end it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from llava_mcore.errors import DataError, problems
from llava_mcore.parallel.groups import Groups, agree
from llava_mcore.training.batch_counts import LoadedBatch

logger = logging.getLogger(__name__)

LEAST_SAMPLES = 1000
"""The rate is computed over at least this many samples, so that one broken sample at the start does not end a run."""
MOST_NAMES = 10


@dataclass
class SkipBudget:
    """The share of samples that a run may skip. The totals are over all ranks; `last` holds this rank's latest skips,
    without duplicates from later epochs."""

    max_rate: float
    last: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_NAMES))

    def report(self, batches: Sequence[LoadedBatch]) -> None:
        """Warn about every sample that this rank has skipped."""
        for skip in (skip for batch in batches for skip in batch.skipped):
            logger.warning("skipped: %s", skip)
            if str(skip) in self.last:
                self.last.remove(str(skip))
            self.last.append(str(skip))

    def check(self, groups: Groups, num_used: int, num_skipped: int) -> None:
        """Raise DataError on all ranks if the run has skipped too many; a collective call if so.

        Args:
            num_used, num_skipped: totals of the run, the same on all ranks.
        """
        seen = num_used + num_skipped
        if num_skipped <= self.max_rate * max(seen, LEAST_SAMPLES):
            return
        messages = agree(groups, problems("the last ones", list(self.last)) if self.last else None)
        title = (
            f"{num_skipped} of {seen} samples could not be used, more than data.max_skip_rate = {self.max_rate:g} "
            "(--max-skip-rate) allows; fix the data, or see --on-too-long"
        )
        raise DataError(problems(title, messages), on_all_ranks=True)
