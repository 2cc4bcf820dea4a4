"""Detection of loss spikes."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

WINDOW = 32
MIN_LOSSES = 8
"""Losses needed before one can be called a spike."""


class SpikeAlert:
    """Compares each loss with the median of those before it."""

    def __init__(self, threshold: float, before: Iterable[float | None] = ()) -> None:
        """`before`: losses of the run so far; None for iterations without one."""
        self.threshold = threshold
        self._losses = deque((x for x in before if x is not None and math.isfinite(x)), maxlen=WINDOW)
        self._first: int | None = None

    def check(self, iteration: int, loss: float) -> str | None:
        """Return a warning if this loss is a spike. Later losses are not compared with spikes."""
        if not math.isfinite(loss):
            return None
        usual = statistics.median(self._losses) if len(self._losses) >= MIN_LOSSES else math.inf
        if loss <= self.threshold * usual:
            self._losses.append(loss)
            self._first = None
            return None
        if self._first is not None and iteration - self._first > WINDOW:
            self._losses.clear()  # not a spike any more: this is the new level
        if self._first is None:
            self._first = max(1, iteration - 1)  # the previous update may be the cause, or this iteration's own data
        return (
            f"loss spike at iteration {iteration}: {loss:.4f} is {loss / usual:.1f} times the recent median "
            f"({usual:.4f}); to skip the data, resume from a checkpoint before iteration "
            f"{self._first} with --skip-train-iteration-range {self._first}-{iteration}"
        )
