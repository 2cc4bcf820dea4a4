"""Chooses the samples of a pack from their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LEVELS = 256
"""Steps of a budget of patches, if it is larger; a sample's patches are rounded up to whole steps."""
WAITING_PACKS = 1.25
"""Packs that the samples fill among which those of one pack are chosen."""
WINDOW, MEDIA_WINDOW = 128, 32
"""Samples that are searched for those that fill a pack best; where there are two budgets."""
CHOICE = 4
"""How often the samples that are searched fill the space."""
MOST_SUMS = 1 << 13
"""Sums of lengths that are told apart where there are two budgets; lengths in longer packs are counted in steps."""


def round_up(length: int, multiple: int) -> int:
    """Return the smallest multiple that is not less than a length."""
    return -(-length // multiple) * multiple


@dataclass(frozen=True)
class PatchBudget:
    """A second budget of a pack: the patches of each sample, and the maximum for a pack."""

    patches: Sequence[int]
    capacity: int


def levels_of(patches: int, capacity: int) -> int:
    """Return a sample's number of steps, of LEVELS for a pack of at most `capacity` patches, rounded up."""
    return -(-patches * LEVELS // capacity)


def is_filled(num_samples: int, num_tokens: int, buffer_size: int, capacity: int) -> bool:
    """Return whether enough samples wait to choose those of a pack from.

    Short samples have to be more than `buffer_size`, or all of them would not fill a long pack.
    """
    return num_samples >= buffer_size and num_tokens >= capacity * WAITING_PACKS


def fullest_pack(
    lengths: Sequence[int], capacity: int, media: PatchBudget | None = None, *, window: int = WINDOW
) -> list[int]:
    """Return ascending indices of a pack that contains sample 0 and is as full as possible.

    The other samples are chosen so that their lengths add up closest to the free space (exact subset sum); among equal
    sums, longer samples win, because short ones fill later gaps best. The same lengths give the same pack. If there are
    very many samples, the first ones are taken in order, and only the remaining space is filled by search.

    Args:
        lengths: tokens of each sample, each at least 1.
        capacity: tokens of a pack.
        media: the second budget.
        window: samples that are searched, without a second budget.

    Raises:
        ValueError: sample 0 is longer than a pack, or has more patches.
    """
    if lengths[0] > capacity:
        raise ValueError(f"a sample of {lengths[0]} tokens does not fit into a pack of {capacity}")
    patches = [0] * len(lengths) if media is None else media.patches
    max_patches = 0 if media is None else media.capacity
    if patches[0] > max_patches:
        raise ValueError(f"a sample of {patches[0]} patches does not fit into a pack of {max_patches}")
    # Take the first ones in order, as long as enough samples follow to fill the remaining space several times.
    others, room, free = list(range(1, len(lengths))), capacity - lengths[0], max_patches - patches[0]
    window = MEDIA_WINDOW if any(patches) else window
    first = _num_taken([(lengths[i], patches[i]) for i in others], window, room, free)
    taken, others = others[:first], others[first : first + window]
    room, free = room - sum(lengths[i] for i in taken), free - sum(patches[i] for i in taken)
    # Fill the rest.
    others.sort(key=lambda i: (-lengths[i], i))
    if any(patches):
        others = [i for i in others if patches[i] <= free]
        in_steps = free > LEVELS
        sizes = [(lengths[i], levels_of(patches[i], free) if in_steps else patches[i]) for i in others]
        chosen = _closest_subset_of_both(sizes, room, LEVELS if in_steps else free)
    else:
        chosen = _closest_subset([lengths[i] for i in others], room)
    return [0, *taken, *sorted(others[position] for position in chosen)]


def _num_taken(samples: Sequence[tuple[int, int]], window: int, room: int, free: int) -> int:
    """Return how many of the first samples, (length, patches), are taken without a search.

    Args:
        room, free: tokens and patches that still fit into the pack.
    """
    tokens, patches = sum(length for length, _ in samples[:window]), sum(count for _, count in samples[:window])
    num_taken = 0
    while len(samples) - num_taken > window:
        # The window after this sample.
        (length, count), added = samples[num_taken], samples[num_taken + window]
        tokens, patches, room, free = (
            tokens - length + added[0],
            patches - count + added[1],
            room - length,
            free - count,
        )
        if CHOICE * room < tokens or CHOICE * free < patches:
            break
        num_taken += 1
    return num_taken


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Divide samples into few packs: each has the longest remaining sample and those that fill the pack best.

    Packs are in the order of their first sample and have ascending indices, so that samples are not sorted by
    length. Raises ValueError for a sample that is longer than a pack.
    """
    left = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    packs: list[list[int]] = []
    while left:
        positions = fullest_pack([lengths[i] for i in left], capacity, window=len(left))
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
        # If the target can be reached with and without a sample, prefer the longer one, which leaves short ones for
        # later packs.
        if lengths[position] <= target and sums[k - 1] >> target - lengths[position] & 1:
            chosen.append(position)
            target -= lengths[position]
    return chosen


def _closest_subset_of_both(samples: Sequence[tuple[int, int]], room: int, levels: int) -> list[int]:
    """Like `_closest_subset`, for (length, levels) whose levels add up to at most `levels`.

    One bit set per number of levels: bit s of sums[k][m] is set if some of the k shortest samples add up to s with at
    most m levels.
    """
    step = -(-room // MOST_SUMS) or 1
    samples, room = [(-(-length // step), taken) for length, taken in samples], room // step
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


def online_fill(
    lengths: Sequence[int], capacity: int, buffer_size: int, media: PatchBudget | None = None, *, multiple: int = 1
) -> float:
    """Return the fill of the packs that the loader builds from this stream of samples while its buffer is full.

    Args:
        media: the second budget, with the patches of every sample of the stream.
        multiple: multiple that lengths are rounded up to; what is added does not count as filled.

    Raises:
        ValueError: a sample is longer than a pack, or has more patches.
    """
    rooms = [min(round_up(length, multiple), max(length, capacity)) for length in lengths]
    waiting, following, size = list[int](), iter(range(len(lengths))), 0
    num_tokens = num_packs = 0
    while True:
        while not is_filled(len(waiting), size, buffer_size, capacity):
            index = next(following, None)
            if index is None:
                break
            waiting.append(index)
            size += rooms[index]
        # At the end of the data the buffer is not full, so packs there would not be typical; but build at least one.
        if not is_filled(len(waiting), size, buffer_size, capacity) and (num_packs or not waiting):
            return num_tokens / (capacity * num_packs) if num_packs else 0.0
        budget = None if media is None else PatchBudget([media.patches[i] for i in waiting], media.capacity)
        pack = fullest_pack([rooms[i] for i in waiting], capacity, budget)
        num_tokens, num_packs = num_tokens + sum(lengths[waiting[k]] for k in pack), num_packs + 1
        size -= sum(rooms[waiting[k]] for k in pack)
        for position in reversed(pack):
            del waiting[position]
