"""Pairs of samples whose signatures may belong to the same contents, without comparing every pair."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import Literal

from datasketch import MinHashLSH

from llava_mcore.dedup.signature import NUM_PERMUTATIONS, Signature, as_minhash, differing_bits

Match = Literal["sample", "image", "text"]
"""Part that two samples must share: everything, one image, or the text."""
BAND_BYTES = 2
"""Hashes with an equal band of 16 bits are compared. Of 16 bands, one is equal if up to 15 bits differ."""
MAX_BITS = 36
"""Bits of 256 that hashes of the same image may differ in; images are compared themselves afterwards."""
LARGEST_BUCKET = 200
"""Hashes of nearly empty images fill some buckets; of a larger one, each is compared with the first ones only."""
TEXT_THRESHOLD = 0.8
"""Jaccard similarity from which texts count as the same."""

Pair = tuple[int, int]
"""Numbers of two signatures, the earlier first."""


def candidate_pairs(signatures: Sequence[Signature], match: Match) -> list[Pair]:
    """Return pairs to compare, each once, in ascending order."""
    if match == "text":
        return sorted(set(_by_text(signatures, range(len(signatures)))))
    pairs = set(_by_image(signatures))
    if match == "sample":
        pairs = {pair for pair in pairs if _same_media(signatures, pair)}
        without = [n for n, signature in enumerate(signatures) if not signature.images]
        pairs |= {pair for pair in _by_text(signatures, without) if _same_media(signatures, pair)}
    return sorted(pairs)


def exact_groups(signatures: Sequence[Signature]) -> list[list[int]]:
    """Return the numbers of signatures with the same digest, for each that occurs more than once."""
    groups: dict[bytes, list[int]] = defaultdict(list)
    for n, signature in enumerate(signatures):
        groups[signature.exact].append(n)
    return [group for group in groups.values() if len(group) > 1]


def _same_media(signatures: Sequence[Signature], pair: Pair) -> bool:
    """Return whether all media of two samples may be the same, in their order."""
    one, other = signatures[pair[0]], signatures[pair[1]]
    if len(one.images) != len(other.images) or one.other_media != other.other_media:
        return False
    return all(differing_bits(a, b) <= MAX_BITS for a, b in zip(one.images, other.images, strict=True))


def _by_image(signatures: Sequence[Signature]) -> Iterator[Pair]:
    """Yield pairs of samples with similar hashes of an image."""
    buckets: dict[tuple[int, bytes], list[tuple[int, bytes]]] = defaultdict(list)
    for n, signature in enumerate(signatures):
        for value in signature.images:
            for start in range(0, len(value), BAND_BYTES):
                buckets[start, value[start : start + BAND_BYTES]].append((n, value))
    for bucket in buckets.values():
        yield from _close(bucket)


def _close(bucket: Sequence[tuple[int, bytes]]) -> Iterator[Pair]:
    """Yield the pairs of a bucket whose hashes differ in few bits."""
    pairs: Iterable[tuple[tuple[int, bytes], tuple[int, bytes]]] = combinations(bucket, 2)
    if len(bucket) > LARGEST_BUCKET:
        pairs = ((bucket[i], bucket[j]) for i in range(LARGEST_BUCKET) for j in range(i + 1, len(bucket)))
    for (a, one), (b, other) in pairs:
        if a != b and differing_bits(one, other) <= MAX_BITS:
            yield min(a, b), max(a, b)


def _by_text(signatures: Sequence[Signature], chosen: Iterable[int]) -> Iterator[Pair]:
    """Yield pairs of some samples with similar text."""
    index = MinHashLSH(threshold=TEXT_THRESHOLD, num_perm=NUM_PERMUTATIONS)
    for n in chosen:
        minhash = as_minhash(signatures[n].text)
        for other in index.query(minhash):
            yield other, n
        index.insert(n, minhash)
