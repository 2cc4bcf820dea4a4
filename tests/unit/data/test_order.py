"""The order of samples: exact passes, shares of a blend, positions, whatever the sizes and numbers of streams."""

from __future__ import annotations

import collections
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llava_mcore.data.order.dataset_order import BLOCK, DatasetOrder, seed_of, shuffled
from llava_mcore.data.order.stream_order import (
    ChosenSample,
    Mixture,
    Progress,
    Schedule,
    Share,
    StreamOrder,
    WeightPoint,
    check_shares,
)
from llava_mcore.errors import DataError

SHUFFLED = [5, 6, 0, 2, 7, 3, 4, 1]
PLACES = [(0, 260), (0, 778), (0, 942), (1, 566), (1000000, 5)]
SIZES = st.one_of(st.integers(1, 5 * BLOCK), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 20 * BLOCK - 1, 1999]))


@given(size=SIZES, window=st.sampled_from([0, 1, 2, BLOCK - 1, BLOCK, 3 * BLOCK, 500, 10**6]), seed=st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_a_pass_reads_every_sample_once(size: int, window: int, seed: int) -> None:
    order = DatasetOrder(size, window, seed)
    for number in (0, 1, 7):
        places = [order.at(number * size + n) for n in range(size)]
        assert {place.pass_index for place in places} == {number}
        assert sorted(place.sample for place in places) == list(range(size))
        if window <= 1:
            assert [place.sample for place in places] == list(range(size))


def test_passes_and_seeds_have_orders_of_their_own() -> None:
    orders = {
        tuple(DatasetOrder(1000, window, seed).at(start + n).sample for n in range(1000))
        for window in (128, 2000)
        for seed in (1, 2)
        for start in (0, 1000)
    }
    assert len(orders) == 8


def test_the_order_is_fixed_for_good() -> None:
    """A later version of numpy or of this module must not change it: a resumed run would read other samples."""
    assert shuffled(8, 5).tolist() == SHUFFLED
    order = DatasetOrder(1000, 128, seed_of(1234, 0))
    assert [order.at(n) for n in (0, 1, 999, 1000, 10**9)] == PLACES
    # So is the blend: datasets of one size have orders of their own, and streams begin at different datasets.
    shares = [Share(name, 100, Schedule.constant(weight)) for name, weight in (("a", 1), ("b", 2), ("c", 1))]
    blend = Mixture.of(shares, window=50, num_streams=4, seed=7)
    choices = [[(x.dataset, x.sample) for x in stream[:3]] for stream in drawn(blend, 3)[1:3]]
    assert choices == [[(1, 80), (0, 28), (1, 71)], [(1, 78), (2, 76), (0, 9)]]


def test_sorted_data_is_mixed_and_a_window_comes_from_few_places() -> None:
    order = DatasetOrder(64_000, 1280, 3)
    first = np.array([order.at(n).sample for n in range(1280)])
    assert len(set(first // BLOCK)) == 1280 // BLOCK
    halves = [
        np.mean(np.array([order.at(n).sample for n in range(k, k + 1280)]) < 32_000) for k in range(0, 64_000, 1280)
    ]
    assert 0.4 < np.mean(halves) < 0.6
    assert np.std(halves) < 0.2


def test_twenty_million_samples_cost_little() -> None:
    order = DatasetOrder(20_000_000, 10_000, 1)
    order.at(12_345_678)
    start = time.process_time()
    for n in range(2000):
        order.at(12_345_678 + n)
    assert (time.process_time() - start) / 2000 < 0.2e-3


def drawn(mixture: Mixture, per_stream: int) -> list[list[ChosenSample]]:
    """Return the first samples of every stream."""
    streams = [StreamOrder(mixture, n) for n in range(mixture.num_streams)]
    rounds = [[stream.next() for stream in streams] for _ in range(per_stream)]  # as training does: streams take turns
    return [[choice for choice in column if choice is not None] for column in zip(*rounds, strict=True)]


@given(size=SIZES, num_streams=st.sampled_from([1, 2, 3, 48]), window=st.sampled_from([0, 100]), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_streams_divide_a_dataset(size: int, num_streams: int, window: int, seed: int) -> None:
    mixture = Mixture.of([Share("a", size, Schedule.constant(1))], window=window, num_streams=num_streams, seed=seed)
    rounds = -(-2 * size // num_streams)
    streams = drawn(mixture, rounds)
    one = StreamOrder(Mixture.of(mixture.shares, window=window, num_streams=1, seed=seed), 0)
    in_order = [one.next() for _ in range(rounds * num_streams)]
    assert in_order == [ChosenSample(0, *mixture.orders[0].at(n)) for n in range(rounds * num_streams)]
    for n in range(rounds):
        together = [stream[n] for stream in streams]
        expected = in_order[n * num_streams : (n + 1) * num_streams]
        assert together == expected if window else sorted(together) == sorted(x for x in expected if x)


@pytest.mark.parametrize("size", [1, 4, 24, 48, 50, 96])
def test_every_stream_reads_all_samples_in_their_order(size: int) -> None:
    mixture = Mixture.of([Share("a", size, Schedule.constant(1))], window=0, num_streams=48, seed=1)
    for stream in drawn(mixture, 2 * size):
        assert collections.Counter(choice.sample for choice in stream) == dict.fromkeys(range(size), 2)


@given(
    weights=st.lists(st.sampled_from([0.0, 0.001, 0.2, 0.5, 1.0, 3.0, 17.0]), min_size=2, max_size=6).filter(any),
    num_streams=st.sampled_from([1, 2, 7]),
    seed=st.integers(0, 9),
)
@settings(max_examples=40, deadline=None)
def test_a_blend_has_its_weights_at_every_point(weights: list[float], num_streams: int, seed: int) -> None:
    shares = [Share(f"{n}", 100 + n, Schedule.constant(weight)) for n, weight in enumerate(weights)]
    mixture = Mixture.of(shares, window=50, num_streams=num_streams, seed=seed)
    for stream in drawn(mixture, 300):
        for length in (10, 100, 300):
            counts = collections.Counter(choice.dataset for choice in stream[:length])
            for n, weight in enumerate(weights):
                assert abs(counts[n] - length * weight / sum(weights)) < len(weights)
                assert weight or not counts[n]


def test_a_step_mixes_the_datasets_of_a_blend() -> None:
    shares = [Share("a", 10**6, Schedule.constant(1)), Share("b", 10**6, Schedule.constant(1))]
    streams = drawn(Mixture.of(shares, window=100, num_streams=48, seed=1), 20)
    for n in range(20):
        assert 12 <= sum(stream[n].dataset for stream in streams) <= 36


@given(num_draws=st.integers(0, 200), stream=st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_a_position_continues_exactly(num_draws: int, stream: int) -> None:
    shares = [
        Share("a", 90, Schedule((WeightPoint(0, 1), WeightPoint(100, 0.1)))),
        Share("b", 7, Schedule.constant(0.3)),
        Share("c", 1, Schedule.constant(0.05), most_passes=3),
    ]
    mixture = Mixture.of(shares, window=20, num_streams=4, seed=2)
    uninterrupted = StreamOrder(mixture, stream)
    for n in range(num_draws):
        uninterrupted.next(Progress(n))
    resumed = StreamOrder(mixture, stream)
    resumed.restore(uninterrupted.position())
    later = [Progress(num_draws + n) for n in range(100)]
    assert [resumed.next(progress) for progress in later] == [uninterrupted.next(progress) for progress in later]


def test_weights_follow_their_schedule() -> None:
    points = (WeightPoint(0, 1), WeightPoint(100, 0), WeightPoint(200, 0))
    schedule = Schedule(points)
    assert [schedule.at(Progress(t)) for t in (-5, 0, 25, 100, 150, 900)] == [1, 1, 0.75, 0, 0, 0]
    by_tokens = Schedule(points, "tokens")
    assert [by_tokens.at(Progress(100, t)) for t in (0, 25, 100)] == [1, 0.75, 0]
    shares = [Share("easy", 50, schedule), Share("hard", 50, Schedule((WeightPoint(0, 0), WeightPoint(100, 1))))]
    stream = StreamOrder(Mixture.of(shares, window=10, num_streams=1, seed=1), 0)
    datasets = [choice.dataset for n in range(200) if (choice := stream.next(Progress(n)))]
    assert np.isclose(np.mean(datasets[:100]), 0.5, atol=0.02)
    assert np.mean(datasets[:20]) < 0.15
    assert set(datasets[100:]) == {1}


@pytest.mark.parametrize("num_streams", [1, 3, 48])
def test_a_dataset_is_left_out_after_its_passes(num_streams: int) -> None:
    shares = [Share("a", 20, Schedule.constant(1), most_passes=2), Share("b", 1000, Schedule.constant(1))]
    streams = drawn(Mixture.of(shares, window=10, num_streams=num_streams, seed=1), 600)
    counts = collections.Counter(choice.sample for stream in streams for choice in stream if choice.dataset == 0)
    assert counts == dict.fromkeys(range(20), 2)
    shares = [
        Share("a", 20, Schedule.constant(1), most_passes=1.5),
        Share("b", 10, Schedule.constant(1), most_passes=1),
    ]
    streams = drawn(Mixture.of(shares, window=10, num_streams=num_streams, seed=1), 100)
    assert sum(map(len, streams)) == 30 + 10


def test_every_sample_is_seen_equally_often() -> None:
    """Streams that pack take different numbers of samples for the same number of packs: short rows, then long ones."""
    short, long, capacity = 1, 8, 16
    mixture = Mixture.of([Share("a", 3200, Schedule.constant(1))], window=1000, num_streams=16, seed=1)
    streams = [StreamOrder(mixture, n) for n in range(16)]
    counts = np.zeros(3200, dtype=int)
    left = [0] * 16
    while counts.sum() < 20 * 3200:
        for n, stream in enumerate(streams):
            while left[n] < capacity:
                choice = stream.next()
                assert choice is not None
                counts[choice.sample] += 1
                left[n] += short if choice.sample < 1600 else long
            left[n] -= capacity
    # Chi-square of equal frequencies: below its mean (3,199), because passes are exact.
    expected = counts.mean()
    assert ((counts - expected) ** 2 / expected).sum() < 3199 / 4
    assert abs(counts[:1600].mean() - counts[1600:].mean()) < 0.1
    assert counts.min() >= 18 and counts.max() <= 22


def test_what_is_wrong_with_weights_is_said_at_once() -> None:
    shares = [
        Share("a", 0, Schedule.constant(1)),
        Share("b", 5, Schedule.constant(-1)),
        Share("c", 5, Schedule((WeightPoint(5, 1), WeightPoint(5, 2)))),
        Share("d", 5, Schedule.constant(1), most_passes=0),
    ]
    with pytest.raises(DataError) as error:
        check_shares(shares)
    for text in ("a has no samples", "b: weights must", "c: the times", "d: max_epochs"):
        assert text in str(error.value)
    with pytest.raises(DataError, match="all weights are 0"):
        check_shares([Share("a", 5, Schedule.constant(0))])
