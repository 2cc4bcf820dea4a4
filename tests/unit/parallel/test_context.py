"""Which tokens of a micro-batch each context-parallel rank has."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llava_mcore.media.batch_fields import FEATURE_POSITIONS, IMAGE_FIELDS, NO_SCALE, PIXEL_SCALE, PIXEL_VALUES
from llava_mcore.models.language.decoder import insert_features
from llava_mcore.parallel.batch import MicroBatch, num_trained, pad_to
from llava_mcore.parallel.context import (
    DividedRow,
    across_nodes,
    cut,
    gathered_rows,
    local_tokens,
    place_of,
    uncuttable,
)


def batch_of(bounds: list[int], *, rows: int = 1) -> MicroBatch:
    """Return a micro-batch of distinct numbers, with three features."""
    shape = (rows, bounds[-1])
    numbers = torch.arange(rows * bounds[-1]).view(shape)
    return MicroBatch(
        input_ids=numbers,
        labels=numbers + 1000,
        loss_mask=(numbers % 3 > 0).float(),
        position_ids=torch.stack([numbers, 2 * numbers, 3 * numbers]),
        media={
            PIXEL_VALUES: torch.zeros(1, 3, 2, 2),
            PIXEL_SCALE: NO_SCALE,
            FEATURE_POSITIONS: torch.tensor([1, 9, rows * bounds[-1] - 2]),
        },
        cu_seqlens=torch.tensor(bounds if rows == 1 else [], dtype=torch.int32),
        dataset_ids=(numbers % 2).int(),
    )


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("rows", [1, 3])
def test_every_token_is_on_one_rank_with_all_that_belongs_to_it(cp: int, rows: int) -> None:
    batch = batch_of([0, 8, 8, 32, 48] if rows == 1 else [0, 16], rows=rows)
    parts = cut(batch, cp, IMAGE_FIELDS)
    assert all(part.input_ids.shape == (rows, batch.input_ids.shape[1] // cp) for part in parts)
    ids = torch.cat([part.input_ids.flatten() for part in parts])
    assert torch.equal(ids.sort().values, batch.input_ids.flatten())
    for part in parts:
        assert torch.equal(part.labels, part.input_ids + 1000)
        assert torch.equal(part.loss_mask, (part.input_ids % 3 > 0).float())
        assert torch.equal(part.position_ids, torch.stack([part.input_ids * i for i in (1, 2, 3)]))
        assert torch.equal(part.dataset_ids, (part.input_ids % 2).int())
        assert torch.equal(part.cu_seqlens, batch.cu_seqlens)
        assert part.media[PIXEL_VALUES] is batch.media[PIXEL_VALUES], "all ranks have all media"


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_features_reach_the_rank_that_has_their_token(cp: int) -> None:
    batch = batch_of([0, 8, 48])
    features = torch.tensor([[-1.0], [-2.0], [-3.0]])
    whole = insert_features(batch.input_ids.t()[..., None].float(), features, batch.media[FEATURE_POSITIONS])
    for rank, part in enumerate(cut(batch, cp, IMAGE_FIELDS)):
        embeddings = part.input_ids.t()[..., None].float()
        placed = insert_features(embeddings, features, part.media[FEATURE_POSITIONS], is_part=cp > 1)
        assert torch.equal(placed, whole[local_tokens([0, 8, 48], cp, rank)])


@pytest.mark.parametrize("cp", [2, 4])
def test_ranks_have_the_same_number_of_pairs_and_gathered_tokens_find_their_places(cp: int) -> None:
    bounds = [0, 8, 32, 32, 48]
    local = [local_tokens(bounds, cp, rank) for rank in range(cp)]
    gathered = torch.cat(local)[gathered_rows(torch.tensor(bounds, dtype=torch.int32), bounds[-1], cp)]
    assert torch.equal(gathered, torch.arange(bounds[-1]))
    starts = torch.cat([torch.full((b - a,), a) for a, b in pairwise(bounds)])
    assert len({int((tokens - starts[tokens]).sum()) for tokens in local}) == 1, "the earlier tokens that are seen"


@pytest.mark.parametrize("cp", [2, 4])
def test_a_rank_takes_its_part_of_a_gathered_row(cp: int) -> None:
    bounds = [0, 8, 32, 48]
    rows, x = gathered_rows(torch.tensor(bounds), 48, cp), torch.randn(48, 3)
    for rank in range(cp):
        group: Any = SimpleNamespace(size=lambda: cp, rank=lambda rank=rank: rank)
        assert torch.equal(DividedRow(rows, group).local_part(x), x[local_tokens(bounds, cp, rank)])


@pytest.mark.parametrize("rows", [1, 3])
def test_padding_is_a_sequence_of_its_own_and_moves_no_feature(rows: int) -> None:
    batch = batch_of([0, 8, 16], rows=rows)
    padded = pad_to(batch, 24, IMAGE_FIELDS)
    assert torch.equal(padded.input_ids[:, :16], batch.input_ids) and not padded.input_ids[:, 16:].any()
    assert torch.equal(padded.dataset_ids[:, :16], batch.dataset_ids) and padded.position_ids.shape[-1] == 24
    assert num_trained(padded) == num_trained(batch) == batch.loss_mask.sum() < batch.loss_mask.numel()
    assert padded.cu_seqlens.tolist() == ([0, 8, 16, 24] if rows == 1 else [])
    before, now = (x.input_ids.flatten()[x.media[FEATURE_POSITIONS]] for x in (batch, padded))
    assert torch.equal(now, before)


@pytest.mark.parametrize("cp", [2, 4])
def test_the_place_of_a_token(cp: int) -> None:
    of_ranks = [local_tokens([0, 48], cp, rank).tolist() for rank in range(cp)]
    for token in range(48):
        rank, index = place_of(token, 48, cp)
        assert of_ranks[rank][index] == token


def test_a_pack_that_cannot_be_cut() -> None:
    batch = batch_of([0, 8, 14, 32])
    assert uncuttable(batch, 1) is None and uncuttable(batch_of([0, 8, 32]), 4) is None
    message = uncuttable(batch, 2)
    assert (
        message is not None and "multiples of 4 = 2 x --cp, but these are not: 1 (6 tokens), 2 (18 tokens)" in message
    )


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((1, 1, 16, 8), None),
        ((2, 4, 16, 8), None),
        ((4, 4, 8, 8), None),  # one node: the rules say what does not divide
        ((2, 8, 32, 8), "--tp 2 x --cp 8 = 16 processes divide the tokens of a sample, on several nodes of 8"),
        ((1, 3, 24, 8), "--cp 2 stays inside a node"),
        (
            (2, 8, 32, 8),
            "--cp 4 stays inside a node; with --cp-comm-type a2a+p2p --cp-a2a-size 4, those of fewer heads do",
        ),
        ((16, 2, 32, 8), "--tp 16 alone does not fit into nodes"),
    ],
)
def test_samples_that_nodes_divide_are_named(sizes: tuple[int, int, int, int], said: str | None) -> None:
    message = across_nodes(*sizes)
    assert message is None if said is None else message is not None and said in message
