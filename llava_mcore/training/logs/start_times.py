"""Seconds that each phase of a training process's start took."""

from __future__ import annotations

import time
from itertools import pairwise

import psutil


class StartTimes:
    """The phases from the start of this process to the end of its first iteration, the first of them its imports."""

    def __init__(self) -> None:
        self._begun: list[tuple[str, float]] = [("imports", psutil.Process().create_time())]

    def begin(self, phase: str) -> None:
        """End the current phase and begin the next."""
        self._begun.append((phase, time.time()))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of every phase, in order; the last one ends now."""
        return {phase: ended - begun for (phase, begun), (_, ended) in pairwise([*self._begun, ("", time.time())])}
