"""The order of one dataset's samples: every pass reads each sample once, in an order of its own."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK = 64
"""Consecutive samples that stay near each other, so that a window of samples comes from few shards."""
CACHED_WINDOWS, CACHED_PASSES = 8, 2
"""Limits per dataset. Streams are at about the same position, so a few windows serve all of a process."""
GOLDEN, FIRST, SECOND = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Constants of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""


class Place(NamedTuple):
    """A sample of a dataset in one of the passes over it."""

    pass_index: int
    sample: int


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the SplitMix64 output for each state. numpy's own generators may change with its version."""
    with np.errstate(over="ignore"):
        return finalized(values + GOLDEN)


def finalized(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return SplitMix64's finalizer of each value: every bit depends on all bits."""
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * FIRST
        z = (z ^ (z >> np.uint64(27))) * SECOND
        return z ^ (z >> np.uint64(31))


def seed_of(*parts: int) -> int:
    """Return one 64-bit seed for several integers, each at least 0."""
    seed = np.zeros(1, dtype=np.uint64)
    for part in parts:
        seed = mix(seed ^ np.uint64(part % (1 << 64)))
    return int(seed[0])


def shuffled(count: int, seed: int) -> NDArray[np.int64]:
    """Return a permutation of 0 to count - 1, the same on every machine and with every version of numpy."""
    with np.errstate(over="ignore"):
        keys = mix(np.uint64(seed) + np.arange(count, dtype=np.uint64))
    return np.argsort(keys, kind="stable")


class _Blocks(NamedTuple):
    """The order of a pass's blocks, and where the last block of the dataset comes, which may be shorter."""

    order: NDArray[np.int32]
    short: int


class DatasetOrder:
    """Passes over `num_samples` samples.

    A pass shuffles blocks of BLOCK consecutive samples over the whole dataset, then the samples within each window of
    about `window` samples. So data that is sorted by kind or length comes mixed, and a window is read from about
    window / BLOCK places. A window of 0 or 1 keeps the samples in their order.
    """

    def __init__(self, num_samples: int, window: int, seed: int) -> None:
        """ValueError if num_samples is less than 1."""
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, found {num_samples}")
        self.num_samples, self.window, self.seed = num_samples, window, seed
        self._blocks_per_window = -(-window // BLOCK)
        # Of each dataset, so that a blend of many does not compute them again and again.
        self._blocks = functools.lru_cache(maxsize=CACHED_PASSES)(self._shuffled_blocks)
        self._samples = functools.lru_cache(maxsize=CACHED_WINDOWS)(self._shuffled_samples)
        self._all = functools.lru_cache(maxsize=CACHED_PASSES)(self._shuffled_pass)

    def at(self, position: int) -> Place:
        """Return the sample at a position, which is counted over all passes from 0."""
        pass_index, offset = divmod(position, self.num_samples)
        if self.window <= 1:
            return Place(pass_index, offset)
        if self.num_samples <= self.window:
            return Place(pass_index, int(self._all(pass_index)[offset]))
        window, place = self._window_at(pass_index, offset)
        return Place(pass_index, int(self._samples(pass_index, window)[place]))

    def _window_at(self, pass_index: int, offset: int) -> tuple[int, int]:
        """Return the window that holds an offset into a pass, and the place in it. One block may be shorter."""
        window, place = divmod(offset, self._blocks_per_window * BLOCK)
        start = window * self._blocks_per_window * BLOCK
        if self._blocks(pass_index).short < window * self._blocks_per_window:
            start -= -self.num_samples % BLOCK  # the short block comes before: samples move up
        place = offset - start
        length = len(self._samples(pass_index, window))
        if place >= length:
            window, place = window + 1, place - length
        return window, place

    def _shuffled_pass(self, pass_index: int) -> NDArray[np.int64]:
        """Return the order of a dataset that is not larger than a window."""
        return shuffled(self.num_samples, seed_of(self.seed, pass_index))

    def _shuffled_blocks(self, pass_index: int) -> _Blocks:
        order = shuffled(-(-self.num_samples // BLOCK), seed_of(self.seed, pass_index)).astype(np.int32)
        return _Blocks(order, int(np.argmax(order)))

    def _shuffled_samples(self, pass_index: int, window: int) -> NDArray[np.int64]:
        """Return the samples of a window in the order in which they are read."""
        count = self._blocks_per_window
        blocks = self._blocks(pass_index).order[window * count : (window + 1) * count].astype(np.int64)
        samples = (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
        samples = samples[samples < self.num_samples]
        return samples[shuffled(len(samples), seed_of(self.seed, pass_index, window + 1))]
