"""Losses far above those before them."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

WINDOW = 32
LEAST = 8
"""Losses that must be known before one can be called a spike."""


class SpikeAlert:
    """Compares each loss with the median of those before it."""

    def __init__(self, threshold: float, before: Iterable[float | None] = ()) -> None:
        """`before`: losses of the run up to here; None for iterations without one."""
        self.threshold = threshold
        self._losses = deque((x for x in before if x is not None and math.isfinite(x)), maxlen=WINDOW)
        self._first: int | None = None

    def check(self, iteration: int, loss: float) -> str | None:
        """Return a warning if this loss is a spike. A spike does not count among the losses of later comparisons."""
        if not math.isfinite(loss):
            return None
        usual = statistics.median(self._losses) if len(self._losses) >= LEAST else math.inf
        if loss <= self.threshold * usual:
            self._losses.append(loss)
            self._first = None
            return None
        if self._first is not None and iteration - self._first > WINDOW:
            self._losses.clear()  # no spike any more, but what is usual now
        if self._first is None:
            self._first = max(1, iteration - 1)  # the update before it may have done it, or its own data
        return (
            f"loss spike at iteration {iteration}: {loss:.4f} is {loss / usual:.1f} times the median of the last ones "
            f"({usual:.4f}); to leave the data out, resume from a checkpoint before iteration "
            f"{self._first} with --skip-train-iteration-range {self._first}-{iteration}"
        )
