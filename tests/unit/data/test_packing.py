"""Packing: which samples share a pack, and what becomes of their tokens."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llava_mcore.data.encode.encode import TooLongError, cut, fit
from llava_mcore.data.loader.collate import collate
from llava_mcore.data.loader.packing import PatchBudget, best_fit, fill, fullest_pack, is_filled, online_fill, round_up
from llava_mcore.data.loader.stream import Packing
from llava_mcore.data.samples import EncodedSample, TokenConversation
from tests.helpers.encoding import placed

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=9)


@given(LENGTHS)
def test_no_pack_around_the_first_sample_is_fuller(lengths: list[int]) -> None:
    capacity = 40
    found = fullest_pack(lengths, capacity)
    others = [lengths[0] + sum(x) for n in range(len(lengths)) for x in combinations(lengths[1:], n)]
    assert found[0] == 0 and found == sorted(set(found))
    assert sum(lengths[i] for i in found) == max(total for total in others if total <= capacity)


@given(st.lists(st.integers(1, 100), max_size=60))
def test_every_sample_is_in_one_pack_that_it_fits_into(lengths: list[int]) -> None:
    packs = best_fit(lengths, 100)
    assert sorted(i for p in packs for i in p) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in p) <= 100 for p in packs)
    assert packs == best_fit(lengths, 100) == sorted(packs), "in the order of their first samples"


def test_too_long_for_a_pack() -> None:
    """A sample that is longer than a pack is refused."""
    with pytest.raises(ValueError, match="41 tokens does not fit into a pack of 40"):
        best_fit([3, 41], 40)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=8),
    st.integers(40, 90),
    st.integers(30, 70),
)
def test_a_pack_keeps_to_both_budgets(samples: list[tuple[int, int]], capacity: int, most: int) -> None:
    """As full as the best of all packs that fit."""
    lengths, patches = [length for length, _ in samples], [number for _, number in samples]
    media = PatchBudget(patches, most)
    found = fullest_pack(lengths, capacity, media)
    assert found[0] == 0 and sorted(set(found)) == found
    assert sum(lengths[i] for i in found) <= capacity and sum(patches[i] for i in found) <= most
    best = 0
    for chosen in range(1 << len(samples) - 1):
        pack = [0, *(i + 1 for i in range(len(samples) - 1) if chosen >> i & 1)]
        total = sum(lengths[i] for i in pack)
        if total <= capacity and sum(patches[i] for i in pack) <= most:
            best = max(best, total)
    assert sum(lengths[i] for i in found) == best


@pytest.mark.parametrize(
    ("capacity", "longest", "most", "count"),
    [(4000, 100, 1000, 7), (40_000, 9000, 50, 1), (1000, 25, 400, 50)],
)
def test_budgets_that_are_counted_in_steps_are_kept(capacity: int, longest: int, most: int, count: int) -> None:
    """What is rounded for the search never makes a pack too large: lengths of long packs, patches, and many samples."""
    draw = random.Random(5)
    lengths = [draw.randint(longest // 2, longest) for _ in range(300)]
    patches = [draw.randint(count // 2, count) for _ in lengths]
    pack = fullest_pack(lengths, capacity, PatchBudget(patches, most))
    assert sum(lengths[i] for i in pack) <= capacity and sum(patches[i] for i in pack) <= most
    assert sum(lengths[i] for i in pack) > 0.9 * capacity or sum(patches[i] for i in pack) > 0.7 * most


def test_more_patches_than_a_pack_may_have() -> None:
    with pytest.raises(ValueError, match="31 patches does not fit into a pack of 30"):
        fullest_pack([3, 4], 10, PatchBudget([31, 0], 30))
    assert fullest_pack([3, 4, 5], 12, PatchBudget([30, 1, 0], 30)) == [0, 2]
    assert fullest_pack([3, 4, 5], 12, PatchBudget([0, 0, 0], 30)) == fullest_pack([3, 4, 5], 12)


def llava_lengths(number: int) -> list[int]:
    """Nine of ten samples with one image of 576 tokens, short and long conversations."""
    draw = random.Random(3)
    texts = [int(draw.lognormvariate(5, 0.8)) + 8 for _ in range(number)]
    return [min(4096, text + 576 * (draw.random() < 0.9)) for text in texts]


def test_fill_of_llava_like_lengths() -> None:
    """A buffer of 64 samples fills packs almost completely."""
    lengths = llava_lengths(3000)
    assert online_fill(lengths, 4096, 64) > 0.995
    assert fill(lengths, best_fit(lengths[:1000], 4096), 4096) < online_fill(lengths, 4096, 16)


def conversation(
    length: int, *, images: int = 0, trained_from: int = 0, width: int = 3, at: int = 0
) -> TokenConversation:
    """Ids 10, 11, …; images of `width` placeholders (id 4) one after the other from `at`."""
    ids = np.arange(10, 10 + length)
    places = np.arange(at, at + images * width)
    ids[places] = 4
    trained = np.arange(length) >= trained_from
    trained[places] = False
    return TokenConversation(f"k{length}", ids, trained, placed(range(at, at + images * width, width), 4, width), False)


def encoded(*conversations: TokenConversation) -> EncodedSample:
    pixels = torch.ones(sum(c.num_rows for c in conversations), 3, 2, 2)
    return EncodedSample(__key__="s", __restore_key__=(), conversations=list(conversations), pixel_values=pixels)


def test_padding_shifts_labels_and_places_pictures() -> None:
    samples = [encoded(conversation(3, trained_from=1)), encoded(conversation(5, images=1, width=2, trained_from=2))]
    batch = collate(samples, seq_length=5, pad_token_id=0, packed=False)
    assert batch.input_ids.tolist() == [[10, 11, 12, 0, 0], [4, 4, 12, 13, 14]]
    # The first text token after an image is trained like any other of the answer.
    assert batch.labels.tolist() == [[11, 12, 0, 0, 0], [0, 12, 13, 14, 0]]
    assert batch.loss_mask.tolist() == [[1, 1, 0, 0, 0], [0, 1, 1, 1, 0]]
    assert batch.media["feature_positions"].tolist() == [5, 6]
    assert batch.media["pixel_values"].shape == (1, 3, 2, 2)
    assert batch.sample_keys == ["k3", "k5"] and batch.num_tokens == 8 and not batch.cu_seqlens.numel()
    assert batch.num_pairs == 1 + 2 + 3 + (1 + 2 + 3 + 4 + 5)


def test_packing_begins_anew_with_every_conversation() -> None:
    first = encoded(conversation(3, trained_from=1), conversation(5, images=1, width=2, trained_from=2))
    second = encoded(conversation(4, trained_from=0))
    batch = collate([first, second], seq_length=8, pad_token_id=0, packed=True)
    assert batch.input_ids.tolist() == [[10, 11, 12, 4, 4, 12, 13, 14, 10, 11, 12, 13, 0, 0, 0, 0]]
    # No conversation learns the first token of the next one.
    assert batch.labels.tolist() == [[11, 12, 0, 0, 12, 13, 14, 0, 11, 12, 13, 0, 0, 0, 0, 0]]
    assert batch.loss_mask.tolist() == [[1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 3]]
    assert batch.cu_seqlens.tolist() == [0, 3, 8, 12, 16] and batch.cu_seqlens.dtype == torch.int32
    assert batch.media["feature_positions"].tolist() == [3, 4]
    assert batch.sample_keys == ["k3", "k5", "k4"] and batch.num_tokens == 12
    full = collate([first], seq_length=8, pad_token_id=0, packed=True)
    assert full.cu_seqlens.tolist() == [0, 3, 8]


@given(st.integers(0, 3), st.integers(0, 9), st.integers(0, 12), st.integers(1, 24))
def test_truncation_never_cuts_a_picture(images: int, at: int, rest: int, most: int) -> None:
    whole = conversation(at + images * 3 + rest, images=images, at=at)
    short = cut(whole, most)
    n = len(short)
    assert n <= most and np.array_equal(short.input_ids, whole.input_ids[:n])
    assert np.array_equal(short.trained, whole.trained[:n])
    assert 3 * len(short.media) == int((short.input_ids == 4).sum())
    assert short.media == whole.media[: len(short.media)] and short.truncated
    if len(short.media) == images:
        assert n == min(most, len(whole))
    else:  # as much as fits before the image that did not
        assert n == at + 3 * len(short.media) <= most < n + 3 or n == most


@given(st.integers(0, 4), st.integers(0, 9), st.integers(0, 12), st.integers(1, 30), st.integers(1, 20))
def test_truncation_keeps_to_both_budgets(images: int, at: int, rest: int, most: int, patches: int) -> None:
    """As much as fits, up to the first image that exceeds the patches, of which the rest is left out too."""
    whole = conversation(at + images * 3 + rest, images=images, at=at)
    each = whole.media[0].tokens.num_patches if images else 0
    short = cut(whole, most, patches)
    assert short.num_patches <= patches and 3 * len(short.media) == int((short.input_ids == 4).sum())
    fitting = images if not each else min(images, patches // each)
    end = len(whole) if fitting == images else at + 3 * fitting
    assert np.array_equal(short.input_ids, cut(whole, min(most, end)).input_ids)


def test_more_patches_than_allowed() -> None:
    """A sample beyond the limit is refused, in the unit that the user knows."""
    talk = conversation(12, images=2, at=1, trained_from=8)
    each = talk.media[0].tokens.num_patches
    assert fit(talk, 12, truncate=False, most_patches=2 * each) is talk
    with pytest.raises(
        TooLongError, match=rf"{2 * each} frames, but data\.max_media_tokens is 1; raise data\.max_media"
    ):
        fit(talk, 12, truncate=False, most_patches=1, unit="frames")
    with pytest.raises(
        TooLongError, match=r"12 tokens .* is 11; and .* raise data\.seq_length .* and data\.max_media_t"
    ):
        fit(talk, 11, truncate=False, most_patches=1)
    with pytest.raises(TooLongError, match="nothing to train on is left"):
        fit(talk, 12, truncate=True, most_patches=each)
    early = conversation(12, images=2, at=4, trained_from=2)
    assert len(fit(early, 12, truncate=True, most_patches=each)) == 7


def test_what_is_too_long() -> None:
    talk = conversation(12, trained_from=8)
    assert fit(talk, 12, truncate=False) is talk
    with pytest.raises(TooLongError, match=r"12 tokens .* data\.seq_length is 11; .*--on-too-long"):
        fit(talk, 11, truncate=False)
    assert len(fit(talk, 9, truncate=True)) == 9
    with pytest.raises(TooLongError, match="nothing to train on is left"):
        fit(talk, 8, truncate=True)


def test_lengths_are_rounded_up_in_a_packs_budget() -> None:
    packing = Packing(8, capacity=64, multiple=8)
    assert [packing.room(n, 1) for n in (1, 8, 9, 64)] == [8, 8, 16, 64]
    # Shorter than the 2 x cp chunks that a sample is cut into, as with --cp 4: padded to a token for each.
    assert packing.room(3, 1) == 8
    # Of several conversations only their sum is known: 3 x 3 tokens take 24.
    assert packing.room(9, 3) >= 24
    assert Packing(8, capacity=64).room(9, 3) == 9
    assert packing.room(60, 9) == 64, "no more than a pack"
    # In predictions as well: eight samples of five tokens, in a pack of 64.
    assert online_fill([5] * 40, 64, 8, multiple=8) == 40 / 64


def test_a_buffer_is_filled_by_samples_and_by_tokens() -> None:
    assert is_filled(8, 100, 8, 80) and not is_filled(7, 1000, 8, 80) and not is_filled(100, 99, 8, 80)


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 400)), min_size=1, max_size=300),
    st.sampled_from((1, 4, 8, 16)),
    st.sampled_from((None, 400, 2000)),
    st.integers(1, 40),
)
@settings(deadline=None, max_examples=60)
def test_packs_of_a_stream_lose_no_sample(
    sizes: list[tuple[int, int]], multiple: int, most_patches: int | None, buffer_size: int
) -> None:
    """Every sample is in one pack, and no pack is too long with its samples rounded up, or has too many patches."""
    capacity, waiting, following, packs = 3008, list[int](), list(range(len(sizes))), list[list[int]]()
    packing = Packing(buffer_size, capacity, most_patches, multiple)
    rooms = [packing.room(length, 1) for length, _ in sizes]
    while waiting or following:
        while following and not is_filled(len(waiting), sum(rooms[i] for i in waiting), buffer_size, capacity):
            waiting.append(following.pop(0))
        media = None if most_patches is None else PatchBudget([sizes[i][1] for i in waiting], most_patches)
        chosen = fullest_pack([rooms[i] for i in waiting], capacity, media)
        packs.append([waiting[k] for k in chosen])
        assert packs[-1][0] == min(waiting) and chosen == sorted(set(chosen))
        waiting = [i for i in waiting if i not in packs[-1]]
    assert sorted(i for pack in packs for i in pack) == list(range(len(sizes)))
    for pack in packs:
        assert sum(round_up(sizes[i][0], multiple) for i in pack) <= capacity
        assert most_patches is None or sum(sizes[i][1] for i in pack) <= most_patches


@pytest.mark.parametrize("multiple", [1, 4, 8])
@pytest.mark.parametrize("seq_length", [32_768, 131_072])
def test_fill_of_long_packs(seq_length: int, multiple: int) -> None:
    """Images and videos, with as many patches as tokens allow on average, and with their lengths rounded for --cp."""
    draw = random.Random(3)
    images = [int(draw.uniform(256, 2400)) for _ in range(2500)]
    media = [size if draw.random() < 0.8 else int(draw.uniform(8, 128)) * 64 for size in images]
    lengths = [size + int(draw.lognormvariate(5, 0.9)) + 8 for size in media]
    assert online_fill(lengths, seq_length, 64, multiple=multiple) > 0.995
    budget = PatchBudget([4 * size for size in media], 4 * seq_length)
    assert online_fill(lengths, seq_length, 64, budget, multiple=multiple) > 0.99


def test_short_samples_fill_long_packs() -> None:
    """More of them wait than the buffer has: 64 would be a third of a pack."""
    lengths = [length - 576 if length > 576 else length for length in llava_lengths(4000)]
    assert sum(lengths[:64]) < 20_000
    assert online_fill(lengths, 32_768, 64) > 0.999
