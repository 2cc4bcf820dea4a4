"""Number of samples per iteration and of iterations per run, from the samples consumed so far."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

_RAMP = re.compile(r"(\d{1,7})[\s,]+(\d{1,7})[\s,]+(\d{1,15})")


@dataclass(frozen=True)
class Ramp:
    """Batch-size ramp-up as in Megatron-LM: from `start` in steps of `increment`, evenly over `samples` samples."""

    start: int
    increment: int
    samples: int

    def steps(self, full: int) -> list[tuple[int, int]]:
        """Return (consumed samples from which it applies, batch size); a batch that starts at a threshold has the new
        size.

        Args:
            full: the last size, which the increments must reach exactly.
        """
        num_steps = (full - self.start) // self.increment
        return [(-(-k * self.samples // num_steps), self.start + k * self.increment) for k in range(num_steps + 1)]


def parse_ramp(text: str) -> Ramp:
    """Return the ramp of START,INCREMENT,SAMPLES. ValueError for anything else."""
    match = _RAMP.fullmatch(text.strip())
    ramp = None if match is None else Ramp(*map(int, match.groups()))
    if ramp is None or not ramp.start or not ramp.increment:
        raise ValueError(f"expected START,INCREMENT,SAMPLES such as 16,16,10000, found {text!r}")
    return ramp


@dataclass(frozen=True)
class BatchSizes:
    """Global batch sizes over a run. `steps`: (consumed samples from which it applies, size), the first at 0."""

    steps: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, full: int, ramp: Ramp | None) -> BatchSizes:
        """Return the sizes of a run that reaches batches of `full` samples."""
        return cls(((0, full),) if ramp is None else tuple(ramp.steps(full)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sizes."""
        return tuple(size for _, size in self.steps)

    def at(self, consumed: int) -> int:
        """Return the batch size of the iteration that starts after this many samples."""
        return max((first, size) for first, size in self.steps if first <= consumed)[1]

    def samples_after(self, iterations: int) -> int:
        """Return the number of samples that this many iterations consume."""
        consumed = 0
        for num_iterations, size in self._intervals():
            taken = iterations if num_iterations is None else min(num_iterations, iterations)
            consumed, iterations = consumed + taken * size, iterations - taken
        return consumed

    def iterations_within(self, samples: int) -> int:
        """Return the number of whole iterations that fit into this many samples."""
        iterations = 0
        for num_iterations, size in self._intervals():
            taken = samples // size if num_iterations is None else min(num_iterations, samples // size)
            iterations, samples = iterations + taken, samples - taken * size
            if num_iterations is None or taken < num_iterations:
                break
        return iterations

    def iterations_between(self, first: int, last: int) -> float:
        """Return how many iterations, and parts of them, consume the samples from `first` to `last`."""
        return self._iterations_of(last) - self._iterations_of(first)

    def _iterations_of(self, samples: float) -> float:
        iterations = 0.0
        for num_iterations, size in self._intervals():
            taken = samples / size if num_iterations is None else min(float(num_iterations), samples / size)
            iterations, samples = iterations + taken, samples - taken * size
        return iterations

    def _intervals(self) -> list[tuple[int | None, int]]:
        """Return (iterations, size) of every run of equal sizes; None: all remaining iterations."""
        consumed, intervals = 0, []
        for (_, size), (end, _) in itertools.pairwise(self.steps):
            num_iterations = max(0, -(-(end - consumed) // size))
            consumed += num_iterations * size
            intervals.append((num_iterations, size))
        return [*intervals, (None, self.steps[-1][1])]
