"""The arithmetic of `check --data-path`: which samples are looked at, quantiles, histogram, fill and groups."""

from __future__ import annotations

from collections import Counter
from unittest.mock import Mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llava_mcore.check_data.finding import Finding
from llava_mcore.check_data.scan import LEAST_SAMPLES, choose
from llava_mcore.check_data.tally import EXAMPLES, DatasetTally, Tally, bins, expected_fill, quantile
from llava_mcore.data.loader.datasets import Dataset, DatasetShard
from llava_mcore.data.loader.packing import LEVELS

COUNTS = st.dictionaries(st.integers(1, 5000), st.integers(1, 50), min_size=1, max_size=30).map(Counter)


def data(*counts: int) -> Dataset:
    """A dataset whose shards have so many samples."""
    firsts = np.cumsum([0, *counts]).tolist()
    shards = tuple(DatasetShard(f"{i}.tar", firsts[i], count) for i, count in enumerate(counts))
    return Dataset("d", shards, "", 1.0, weight=1.0, subflavors={}, source=Mock(), cook=Mock())


SHARDS = st.lists(st.lists(st.integers(1, 400), min_size=1, max_size=40), min_size=1, max_size=4)


@given(SHARDS, st.booleans())
def test_every_shard_is_looked_at(counts: list[list[int]], full: bool) -> None:
    datasets = [data(*one) for one in counts]
    tasks = choose(datasets, full=full)
    assert tasks == choose(datasets, full=full)
    chosen = [(index, number) for index, numbers in tasks for number in numbers]
    assert len(set(chosen)) == len(chosen)
    total = sum(map(sum, counts))
    assert len(chosen) == total if full else len(chosen) <= total
    for index, one in enumerate(datasets):
        for shard in one.shards:
            inside = [n for i, n in chosen if i == index and shard.first <= n < shard.first + shard.count]
            assert inside and all(one.shard_of(n) is shard for n in inside)


def test_few_shards_give_enough_samples_and_many_one_each() -> None:
    few = [n for _, numbers in choose([data(1000, 1000)], full=False) for n in numbers]
    assert len(few) == LEAST_SAMPLES and {0, 999, 1000, 1999} <= set(few)
    many = choose([data(*[100] * 2000)], full=False)
    assert len(many) == 2000
    places = Counter(numbers[0] % 100 // 10 for _, numbers in many)
    assert min(places.values()) > 150, "one of every shard, but not always the same place in it"


@given(COUNTS, st.sampled_from([0.1, 0.5, 0.9, 0.99, 1.0]))
def test_quantiles_are_numpys(counts: Counter[int], part: float) -> None:
    assert quantile(counts, part) == np.quantile(sorted(counts.elements()), part, method="inverted_cdf")


@given(COUNTS, st.integers(1, 12))
def test_histogram_holds_everything_once(counts: Counter[int], number: int) -> None:
    found = bins(counts, number)
    assert 1 <= len(found) <= number
    assert [first for first, _, _ in found[1:]] == [last + 1 for _, last, _ in found[:-1]]
    for first, last, count in found:
        assert count == sum(c for value, c in counts.items() if first <= value <= last)
    assert sum(count for _, _, count in found) == counts.total()


def test_fill() -> None:
    """The expected fill of packs follows from the lengths; what is too long is not packed."""
    assert expected_fill(Counter({(64, 0): 5}), 64, 16) == 1
    assert expected_fill(Counter({(40, 0): 5}), 64, 16) == 40 / 64
    assert (expected_fill(Counter({(30, 0): 5, (34, 0): 5}), 64, 16) or 0) > 0.98
    assert expected_fill(Counter({(40, 0): 5, (65, 0): 1000}), 64, 16) == 40 / 64, "what is too long is not packed"
    assert expected_fill(Counter({(65, 0): 5}), 64, 16) is None


def test_fill_with_a_budget_of_patches() -> None:
    """Two samples with half of the steps fill the second budget; one with more than all steps is never packed."""
    assert expected_fill(Counter({(16, LEVELS // 2): 5}), 64, 16) == 32 / 64
    assert expected_fill(Counter({(16, LEVELS // 4): 5}), 64, 16) == 1
    assert expected_fill(Counter({(16, LEVELS // 2): 5, (64, LEVELS + 1): 1000}), 64, 16) == 32 / 64
    assert expected_fill(Counter({(16, LEVELS + 1): 5}), 64, 16) is None
    tally = Tally([DatasetTally("d", "", 1.0, 1, 3)], most_patches=6 * LEVELS)
    for number, patches in enumerate((0, 6 * LEVELS, 7)):
        tally.add(Finding(0, number, "0.tar", "k", num_tokens=5, num_patches=patches), num_examples=0)
    assert tally.sizes == {(5, 0): 1, (5, LEVELS): 1, (5, 2): 1} and tally.patches == {0: 1, 6 * LEVELS: 1, 7: 1}


def test_problems_are_grouped_but_for_their_numbers() -> None:
    tally = Tally([DatasetTally("d", "", 1.0, 1, 100)])
    for i in range(10):
        reason = f"part 'x{i}' is {i} bytes long" if i < 7 else "another"
        tally.add(Finding(0, i, "0.tar", f"k{i}", "left out", (reason,)), num_examples=1)
    tally.add(Finding(0, 10, "0.tar", "k10", num_tokens=5, num_images=2), num_examples=1)
    first, second = tally.problems("left out")
    assert (first.reason, first.count, second.count) == ("part 'x0' is 0 bytes long", 7, 3)
    assert first.examples == [("d", "0.tar", f"k{i}") for i in range(EXAMPLES)]
    assert (tally.num_seen, tally.num_left_out) == (11, 10)
    assert [found.key for found in tally.examples] == ["k10"]
    assert tally.datasets[0].per_sample(tally.datasets[0].num_used) == 100 / 11
