"""The order of one dataset's samples: every pass reads each sample once, in an order of its own."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK = 64
"""Consecutive samples that stay near each other, so that a window of samples comes from few shards."""
CACHED_WINDOWS = 32
"""Streams are at about the same position, so a few windows serve all of a process."""
GOLDEN, FIRST, SECOND = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Constants of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""


class Place(NamedTuple):
    """A sample of a dataset in one of the passes over it."""

    pass_index: int
    sample: int


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the SplitMix64 output for each state. numpy's own generators may change with its version."""
    with np.errstate(over="ignore"):
        z = values + GOLDEN
        z = (z ^ (z >> np.uint64(30))) * FIRST
        z = (z ^ (z >> np.uint64(27))) * SECOND
        return z ^ (z >> np.uint64(31))


def seed_of(*numbers: int) -> int:
    """Return one 64-bit seed for several numbers, each at least 0."""
    seed = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        seed = mix(seed ^ np.uint64(number % (1 << 64)))
    return int(seed[0])


def shuffled(count: int, seed: int) -> NDArray[np.int64]:
    """Return a permutation of 0 to count - 1, the same on every machine and with every version of numpy."""
    with np.errstate(over="ignore"):
        keys = mix(np.uint64(seed) + np.arange(count, dtype=np.uint64))
    return np.argsort(keys, kind="stable")


class _Blocks(NamedTuple):
    """The order of a pass's blocks, and where the last block of the dataset comes, which may be shorter."""

    order: NDArray[np.int64]
    short: int


@dataclass(frozen=True)
class DatasetOrder:
    """Passes over `num_samples` samples.

    A pass shuffles blocks of BLOCK consecutive samples over the whole dataset, then the samples within each window of
    about `window` samples. So data that is sorted by kind or length comes mixed, and a window is read from about
    window / BLOCK places. A window of 0 or 1 keeps the samples in their order.
    """

    num_samples: int
    window: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, found {self.num_samples}")

    def at(self, position: int) -> Place:
        """Return the sample at a position, which is counted over all passes from 0."""
        pass_index, offset = divmod(position, self.num_samples)
        if self.window <= 1:
            return Place(pass_index, offset)
        if self.num_samples <= self.window:
            return Place(pass_index, int(_window_of_all(self.num_samples, seed_of(self.seed, pass_index))[offset]))
        window, place = self._window_at(pass_index, offset)
        return Place(pass_index, int(_samples(self, pass_index, window)[place]))

    @property
    def _blocks_per_window(self) -> int:
        return -(-self.window // BLOCK)

    def _window_at(self, pass_index: int, offset: int) -> tuple[int, int]:
        """Return the window that holds an offset into a pass, and the place in it. One block may be shorter."""
        window, place = divmod(offset, self._blocks_per_window * BLOCK)
        start = window * self._blocks_per_window * BLOCK
        shuffle = _blocks(self, pass_index)
        if shuffle.short < window * self._blocks_per_window:  # the short block lies before: samples move up
            start -= -self.num_samples % BLOCK
        place = offset - start
        length = len(_samples(self, pass_index, window))
        if place >= length:
            window, place = window + 1, place - length
        return window, place


@functools.lru_cache(maxsize=CACHED_WINDOWS)
def _window_of_all(count: int, seed: int) -> NDArray[np.int64]:
    return shuffled(count, seed)


@functools.lru_cache(maxsize=CACHED_WINDOWS)
def _blocks(order: DatasetOrder, pass_index: int) -> _Blocks:
    order_of_blocks = shuffled(-(-order.num_samples // BLOCK), seed_of(order.seed, pass_index))
    return _Blocks(order_of_blocks, int(np.argmax(order_of_blocks)))


@functools.lru_cache(maxsize=CACHED_WINDOWS)
def _samples(order: DatasetOrder, pass_index: int, window: int) -> NDArray[np.int64]:
    """Return the samples of a window in the order in which they are read."""
    count = order._blocks_per_window
    blocks = _blocks(order, pass_index).order[window * count : (window + 1) * count]
    samples = (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
    samples = samples[samples < order.num_samples]
    return samples[shuffled(len(samples), seed_of(order.seed, pass_index, window + 1))]
