"""Reasons to end a run before its last iteration."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from llava_mcore.parallel.groups import Groups, sum_over_ranks


@dataclass(frozen=True)
class StopRules:
    """Stop on request, or when the time is up. Ranks may differ: they have to agree in a collective call."""

    asked: Callable[[], bool]
    until: float | None
    """Value of time.monotonic() at which the time is up."""

    def due(self) -> bool:
        """Return whether this rank would stop."""
        return self.asked() or (self.until is not None and time.monotonic() >= self.until)


def any_rank(groups: Groups, *flags: bool) -> list[bool]:
    """Return for each flag whether it is set on any rank; a collective call on the host."""
    return [count > 0 for count in sum_over_ranks(groups, flags)]
