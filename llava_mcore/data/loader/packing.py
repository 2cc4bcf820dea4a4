"""Chooses the samples of a pack from their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LEVELS = 64
"""Steps of a pack's patch budget; a sample's patches are rounded up to whole steps."""


def round_up(length: int, multiple: int) -> int:
    """Return the smallest multiple that is not less than a length."""
    return -(-length // multiple) * multiple


@dataclass(frozen=True)
class PatchBudget:
    """A second budget of a pack: the patches of each sample, and the maximum for a pack."""

    patches: Sequence[int]
    capacity: int

    def levels(self) -> list[int]:
        """Return each sample's number of steps, of LEVELS for a pack, rounded up."""
        return [levels_of(count, self.capacity) for count in self.patches]


def levels_of(patches: int, capacity: int) -> int:
    """Return a sample's number of steps, of LEVELS for a pack of at most `capacity` patches, rounded up."""
    return -(-patches * LEVELS // capacity)


def fullest_pack(lengths: Sequence[int], capacity: int, media: PatchBudget | None = None) -> list[int]:
    """Return ascending indices of a pack that contains sample 0 and is as full as possible.

    Chosen are those of the others whose lengths add up closest to the free space (exact subset sum); among equal sums
    those with longer samples, because short ones fill later gaps best. The same lengths give the same pack.

    Args:
        lengths: tokens of each sample, each at least 1.
        capacity: tokens of a pack.
        media: the second budget.

    Raises:
        ValueError: sample 0 is longer than a pack, or has more patches.
    """
    if lengths[0] > capacity:
        raise ValueError(f"a sample of {lengths[0]} tokens does not fit into a pack of {capacity}")
    others = sorted(range(1, len(lengths)), key=lambda i: (-lengths[i], i))
    if media is not None and any(media.patches):
        levels = media.levels()
        if levels[0] > LEVELS:
            raise ValueError(f"a sample of {media.patches[0]} patches does not fit into a pack of {media.capacity}")
        room = (capacity - lengths[0], LEVELS - levels[0])
        chosen = _closest_subset_of_both([(lengths[i], levels[i]) for i in others], *room)
    else:
        chosen = _closest_subset([lengths[i] for i in others], capacity - lengths[0])
    return [0, *sorted(others[position] for position in chosen)]


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Divide samples into few packs: each has the longest remaining sample and those that fill the pack best.

    Packs are in the order of their first sample and have ascending indices, so that samples are not sorted by
    length. Raises ValueError for a sample that is longer than a pack.
    """
    left = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    packs: list[list[int]] = []
    while left:
        positions = fullest_pack([lengths[i] for i in left], capacity)
        packs.append(sorted(left[position] for position in positions))
        taken = set(positions)
        left = [index for position, index in enumerate(left) if position not in taken]
    return sorted(packs)


def _closest_subset(lengths: Sequence[int], room: int) -> list[int]:
    """Return the indices of lengths (sorted descending) whose sum is the largest that is at most `room`.

    Subset sum over bit sets: bit s of an integer is set if some of the lengths add up to s.
    """
    if not lengths or lengths[-1] > room:
        return []
    within = (1 << room + 1) - 1
    sums = [1]  # sums[k]: with the k shortest lengths
    for length in reversed(lengths):
        sums.append((sums[-1] | sums[-1] << length) & within)
    target = sums[-1].bit_length() - 1
    chosen = []
    for k in range(len(sums) - 1, 0, -1):
        position = len(lengths) - k
        # If both choices reach the target, the longer one is taken, which leaves short ones for later packs.
        if lengths[position] <= target and sums[k - 1] >> target - lengths[position] & 1:
            chosen.append(position)
            target -= lengths[position]
    return chosen


def _closest_subset_of_both(samples: Sequence[tuple[int, int]], room: int, levels: int) -> list[int]:
    """Like `_closest_subset`, for (length, levels) whose levels add up to at most `levels`.

    One bit set per number of levels: bit s of sums[k][m] is set if some of the k shortest samples add up to s with at
    most m levels.
    """
    within = (1 << room + 1) - 1
    sums = [[1] * (levels + 1)]
    for length, taken in reversed(samples):
        before = sums[-1]
        sums.append(
            [bits | (before[m - taken] << length & within if m >= taken else 0) for m, bits in enumerate(before)]
        )
    target, left = sums[-1][levels].bit_length() - 1, levels
    chosen = []
    for k in range(len(sums) - 1, 0, -1):
        position = len(samples) - k
        length, taken = samples[position]
        if length <= target and taken <= left and sums[k - 1][left - taken] >> target - length & 1:
            chosen.append(position)
            target, left = target - length, left - taken
    return chosen


def fill(lengths: Sequence[int], packs: Sequence[Sequence[int]], capacity: int) -> float:
    """Return the fraction of all packs that is filled with tokens, from 0 to 1."""
    return sum(lengths[i] for pack in packs for i in pack) / (capacity * len(packs)) if packs else 0.0


def online_fill(lengths: Sequence[int], capacity: int, buffer_size: int, media: PatchBudget | None = None) -> float:
    """Return the fill of the packs that the loader builds from this stream of samples while its buffer is full.

    Args:
        media: the second budget, with the patches of every sample of the stream.

    Raises:
        ValueError: a sample is longer than a pack, or has more patches.
    """
    waiting = list(range(min(buffer_size, len(lengths))))
    following = iter(range(buffer_size, len(lengths)))
    num_tokens = num_packs = 0
    while len(waiting) == min(buffer_size, len(lengths)):
        budget = None if media is None else PatchBudget([media.patches[i] for i in waiting], media.capacity)
        pack = fullest_pack([lengths[i] for i in waiting], capacity, budget)
        num_tokens, num_packs = num_tokens + sum(lengths[waiting[k]] for k in pack), num_packs + 1
        for position in reversed(pack):
            del waiting[position]
        waiting += [i for _, i in zip(pack, following, strict=False)]
    return num_tokens / (capacity * num_packs) if num_packs else 0.0
