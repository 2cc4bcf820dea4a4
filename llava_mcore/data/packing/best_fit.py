"""Which samples share a packed sequence. Pure arithmetic on their lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LEVELS = 64
"""Steps in which patches are counted; what a sample has is rounded up to whole ones."""


@dataclass(frozen=True)
class Media:
    """A second budget of a pack: patches of each sample, and the most that a pack may have."""

    patches: Sequence[int]
    most: int

    def levels(self) -> list[int]:
        """Return the steps, of LEVELS for a pack, that each sample takes; never fewer than it has."""
        return [-(-number * LEVELS // self.most) for number in self.patches]


def fullest_pack(lengths: Sequence[int], capacity: int, media: Media | None = None) -> list[int]:
    """Return ascending indices of a pack that holds sample 0 and is filled as well as the others allow.

    Those of the others are taken whose lengths add up closest to the free room (exact subset sum); among equal sums
    the one with longer samples, because short ones fill later gaps best. The same lengths give the same pack.

    Args:
        lengths: tokens of each sample, each at least 1.
        capacity: tokens of a pack.
        media: what else a pack must keep to.

    Raises:
        ValueError: sample 0 is longer than a pack, or has more patches.
    """
    if lengths[0] > capacity:
        raise ValueError(f"a sample of {lengths[0]} tokens does not fit into a pack of {capacity}")
    others = sorted(range(1, len(lengths)), key=lambda i: (-lengths[i], i))
    if media is not None and any(media.patches):
        levels = media.levels()
        if levels[0] > LEVELS:
            raise ValueError(f"a sample of {media.patches[0]} patches does not fit into a pack of {media.most}")
        room = (capacity - lengths[0], LEVELS - levels[0])
        chosen = _closest_subset_of_both([(lengths[i], levels[i]) for i in others], *room)
    else:
        chosen = _closest_subset([lengths[i] for i in others], capacity - lengths[0])
    return [0, *sorted(others[place] for place in chosen)]


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Divide samples over few packs: the longest that is left, with what fills its pack best.

    Packs come in the order of their first sample and hold ascending indices, so that long and short samples do not
    come out sorted. Raises ValueError for a sample that is longer than a pack.
    """
    left = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    packs: list[list[int]] = []
    while left:
        places = fullest_pack([lengths[i] for i in left], capacity)
        packs.append(sorted(left[place] for place in places))
        taken = set(places)
        left = [index for place, index in enumerate(left) if place not in taken]
    return sorted(packs)


def _closest_subset(lengths: Sequence[int], room: int) -> list[int]:
    """Return the places of lengths, descending, whose sum is the largest that is at most room.

    Subset sum over bit sets: bit s of an integer says that some of the lengths looked at add up to s.
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
        place = len(lengths) - k
        # Taking the longer one where both ways lead to the target leaves the short ones for later packs.
        if lengths[place] <= target and sums[k - 1] >> target - lengths[place] & 1:
            chosen.append(place)
            target -= lengths[place]
    return chosen


def _closest_subset_of_both(samples: Sequence[tuple[int, int]], room: int, levels: int) -> list[int]:
    """As `_closest_subset` of (length, levels), whose levels add up to at most `levels`.

    The same bit sets, one for each number of levels: bit s of sums[k][m] says that some of the k shortest samples add
    up to s with at most m levels.
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
        place = len(samples) - k
        length, taken = samples[place]
        if length <= target and taken <= left and sums[k - 1][left - taken] >> target - length & 1:
            chosen.append(place)
            target, left = target - length, left - taken
    return chosen


def fill(lengths: Sequence[int], packs: Sequence[Sequence[int]], capacity: int) -> float:
    """Return the part of all packs that holds tokens, from 0 to 1."""
    return sum(lengths[i] for pack in packs for i in pack) / (capacity * len(packs)) if packs else 0.0


def online_fill(lengths: Sequence[int], capacity: int, buffer_size: int) -> float:
    """Return the fill of the packs that the loader makes of this stream of samples while its buffer is full.

    Raises ValueError for a sample that is longer than a pack.
    """
    waiting = list(lengths[:buffer_size])
    following = iter(lengths[buffer_size:])
    num_tokens = num_packs = 0
    while len(waiting) == min(buffer_size, len(lengths)):
        pack = fullest_pack(waiting, capacity)
        num_tokens, num_packs = num_tokens + sum(waiting[i] for i in pack), num_packs + 1
        for index in reversed(pack):
            del waiting[index]
        waiting += [length for length, _ in zip(following, pack, strict=False)]
    return num_tokens / (capacity * num_packs) if num_packs else 0.0
