"""Groups of the same samples: candidates, confirmed and joined."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llava_mcore.dedup.candidates import Match, Pair, candidate_pairs, exact_groups
from llava_mcore.dedup.confirm import Confirmed, Confirmer
from llava_mcore.dedup.signature import SamplePlace, Signature


@dataclass(frozen=True)
class Duplicate:
    """A sample that is the same as an earlier one."""

    place: SamplePlace
    exact: bool
    text: float
    image: float | None
    """How similar it is to a sample of its group (see `Confirmed`)."""


@dataclass(frozen=True)
class DuplicateGroup:
    """Samples that are the same: the first one, and the others."""

    first: SamplePlace
    duplicates: tuple[Duplicate, ...]


def find_groups(
    signatures: Sequence[Signature],
    confirmer: Confirmer,
    match: Match,
    *,
    only_exact: bool = False,
    num_reference: int = 0,
    on_pair: Callable[[], None] = lambda: None,
) -> list[DuplicateGroup]:
    """Return the groups of the same samples, in the order of their first ones.

    Args:
        signatures: in the order in which samples are preferred; the first one of a group stays.
        only_exact: only samples with equal text and media.
        num_reference: the first signatures are those of an evaluation set: only groups with one of them are returned,
            and only other samples are duplicates.
        on_pair: called after each comparison.
    """
    how: dict[Pair, Confirmed | None] = {}
    for group in exact_groups(signatures):
        how |= dict.fromkeys(((group[0], other) for other in group[1:]), None)
    if not only_exact:
        joined = _Joined(len(signatures), how)
        compared = set[Pair]()
        for a, b in candidate_pairs(signatures, match):
            if num_reference and (a >= num_reference or b < num_reference):
                continue
            # Compared with the sample that stays: in a chain of slightly different ones, the ends are not the same.
            first, other = sorted((joined.root(a), joined.root(b)))
            if first != other and (first, other) not in compared:
                compared.add((first, other))
                confirmed = confirmer.compare(signatures[first].place, signatures[other].place)
                if confirmed is not None:
                    how[first, other] = confirmed
                    joined.join(first, other)
            on_pair()
    return _groups(signatures, how, num_reference)


def _groups(
    signatures: Sequence[Signature], how: dict[Pair, Confirmed | None], num_reference: int
) -> list[DuplicateGroup]:
    joined = _Joined(len(signatures), how)
    members: dict[int, list[int]] = defaultdict(list)
    for n in range(len(signatures)):
        members[joined.root(n)].append(n)
    by_later: dict[int, Confirmed | None] = {}
    for (_, later), confirmed in how.items():
        by_later.setdefault(later, confirmed)
    result = []
    for first, *others in sorted(members.values()):
        if num_reference:
            if first >= num_reference:
                continue
            others = [n for n in others if n >= num_reference]
        if others:
            duplicates = [_duplicate(signatures[n].place, by_later.get(n)) for n in others]
            result.append(DuplicateGroup(signatures[first].place, tuple(duplicates)))
    return result


def _duplicate(place: SamplePlace, confirmed: Confirmed | None) -> Duplicate:
    if confirmed is None:
        return Duplicate(place, exact=True, text=1.0, image=0.0)
    return Duplicate(place, exact=False, text=confirmed.text, image=confirmed.image)


class _Joined:
    """Disjoint sets of numbers; the smallest number of a set is its root."""

    def __init__(self, count: int, pairs: dict[Pair, Confirmed | None]) -> None:
        self._parents = list(range(count))
        for a, b in pairs:
            self.join(a, b)

    def root(self, n: int) -> int:
        while self._parents[n] != n:
            self._parents[n] = self._parents[self._parents[n]]
            n = self._parents[n]
        return n

    def join(self, a: int, b: int) -> None:
        a, b = sorted((self.root(a), self.root(b)))
        self._parents[b] = a
