"""Layouts and shard rules are exact inverses, agree with independent formulas, and mistakes are named."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llava_mcore.errors import ConversionError
from llava_mcore.weights.layouts import (
    Concat,
    ConcatRows,
    Copy,
    FuseGatedQKV,
    FuseQKV,
    FuseQV,
    PadColumns,
    PadParts,
    PadRows,
    Regroup,
    Reshape,
)
from llava_mcore.weights.table import COLUMN, GATED_COLUMN, REPLICATED, ROW, Entry, MappingTable, Shard, check_coverage

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
TAIL = st.sampled_from([(), (3,), (2, 5)])


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 7), st.integers(1, 5), TAIL, DTYPES)
def test_fuse_qkv(groups: int, per_group: int, d: int, tail: tuple[int, ...], dtype: torch.dtype) -> None:
    """Queries, keys and values come back bit for bit, also from files that hold them fused."""
    heads = groups * per_group
    q, k, v = tensor(heads * d, *tail, dtype=dtype), tensor(groups * d, *tail, dtype=dtype), tensor(groups * d, *tail)
    v = v.to(dtype)
    layout = FuseQKV(heads, groups)
    fused = layout.to_megatron(q, k, v)
    back = layout.to_hf(fused)
    assert all(torch.equal(a, b) for a, b in zip(back, (q, k, v), strict=True))
    # Phi-3's files hold the three below each other.
    rows = torch.cat([q, k, v])
    assert torch.equal(Regroup(heads, groups).to_megatron(rows), fused)
    assert torch.equal(Regroup(heads, groups).to_hf(fused)[0], rows)
    # Megatron's definition: group i holds its query heads, then key head i, then value head i.
    for i in range(groups):
        rows = fused[i * (per_group + 2) * d : (i + 1) * (per_group + 2) * d]
        expected = [q[i * per_group * d : (i + 1) * per_group * d], k[i * d : (i + 1) * d], v[i * d : (i + 1) * d]]
        assert torch.equal(rows, torch.cat(expected))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), TAIL, DTYPES)
def test_fuse_qkv_with_a_gate(
    groups: int, per_group: int, d: int, tail: tuple[int, ...], dtype: torch.dtype
) -> None:  # fmt: skip
    """Files hold each head's query, then its gate; megatron-core a group's queries, its gates, its key, its value."""
    heads = groups * per_group
    both, k, v = (tensor(n * d, *tail, dtype=dtype) for n in (2 * heads, groups, groups))
    fused = FuseGatedQKV(heads, groups).to_megatron(both, k, v)
    assert all(
        torch.equal(a, b) for a, b in zip(FuseGatedQKV(heads, groups).to_hf(fused), (both, k, v), strict=True)
    )  # fmt: skip
    size = 2 * (per_group + 1) * d
    for i in range(groups):
        of_heads = both[i * per_group * 2 * d : (i + 1) * per_group * 2 * d].split(d)
        expected = [*of_heads[::2], *of_heads[1::2], k[i * d : (i + 1) * d], v[i * d : (i + 1) * d]]
        assert torch.equal(fused[i * size : (i + 1) * size], torch.cat(expected))


def test_parts_of_unequal_sizes_are_divided_each() -> None:
    """A delta net's first matrix: Hugging Face's four, of which the first has queries, keys and values."""
    shard, layout = Shard(0, sections=(4, 4, 8, 8, 2, 2)), ConcatRows((16, 8, 2, 2))
    x = torch.arange(28.0)[:, None]
    assert [len(part) for part in layout.to_hf(x)] == [16, 8, 2, 2]
    assert torch.equal(layout.to_megatron(*layout.to_hf(x)), x)
    first, second = shard.split(x, 2)
    assert first[:, 0].tolist() == [0, 1, 4, 5, 8, 9, 10, 11, 16, 17, 18, 19, 24, 26]
    assert torch.equal(shard.join([first, second]), x)
    with pytest.raises(ConversionError, match=r"dim 0 for tp 4: its parts are 4, 4, 8, 8, 2, 2"):
        shard.split(x, 4)


def test_biases_without_that_of_keys() -> None:
    """A missing bias of the keys is zero in the fused one."""
    query, value = torch.randn(12), torch.randn(12)
    fused = FuseQV(4).to_megatron(query, value)
    assert torch.equal(fused, FuseQKV(4, 4).to_megatron(query, torch.zeros(12), value))
    assert all(torch.equal(x, y) for x, y in zip(FuseQV(4).to_hf(fused), (query, value), strict=True))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), TAIL, DTYPES)
def test_concat_reshape_pad_copy(num: int, rows: int, tail: tuple[int, ...], dtype: torch.dtype) -> None:
    """Each transform is undone by its inverse, and padding is zero."""
    parts = [tensor(rows, *tail, dtype=dtype) for _ in range(num)]
    back = Concat(num).to_hf(Concat(num).to_megatron(*parts))
    assert all(torch.equal(a, b) for a, b in zip(back, parts, strict=True))
    (x, *_) = parts
    pad = PadRows(rows, rows + num)
    padded = pad.to_megatron(x)
    assert padded.shape[0] == rows + num and not padded[rows:].any()
    assert torch.equal(pad.to_hf(padded)[0], x)
    each = PadParts(num, rows, rows + 2)
    padded = each.to_megatron(*parts)
    assert all(torch.equal(a, b) for a, b in zip(each.to_hf(padded), parts, strict=True))
    assert padded.shape[0] == num * (rows + 2) and not padded.unflatten(0, (num, -1))[:, rows:].any()
    matrix = x.reshape(rows, -1)
    columns = matrix.shape[1]
    wide = PadColumns(columns, columns + num).to_megatron(matrix)
    assert wide.shape == (rows, columns + num) and not wide[:, columns:].any()
    assert torch.equal(PadColumns(columns, columns + num).to_hf(wide)[0], matrix)
    shape = Reshape(tuple(x.shape), (1, *x.shape))
    assert torch.equal(shape.to_hf(shape.to_megatron(x))[0], x)
    assert torch.equal(Copy().to_hf(Copy().to_megatron(x))[0], x)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([REPLICATED, COLUMN, ROW, GATED_COLUMN]), st.sampled_from([1, 2, 3, 4]), st.integers(1, 3))
def test_shards_join_again(shard: Shard, tp: int, k: int) -> None:
    x = tensor(2 * tp * k, tp * k)
    slices = shard.split(x, tp)
    assert len(slices) == tp
    assert torch.equal(shard.join(slices), x)
    if shard is GATED_COLUMN:
        gate, up = x.chunk(2)
        expected = [torch.cat(pair) for pair in zip(gate.chunk(tp), up.chunk(tp), strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(slices, expected, strict=True))


def test_a_size_that_does_not_divide_is_an_error() -> None:
    with pytest.raises(ConversionError, match=r"\(6, 2\).*dim 0.*tp 4"):
        COLUMN.split(tensor(6, 2), 4)
    with pytest.raises(ConversionError, match=r"2 block\(s\) x tp 2: 6 is not a multiple of 4"):
        GATED_COLUMN.split(tensor(6, 2), 2)


def test_a_name_listed_twice_is_an_error() -> None:
    with pytest.raises(ConversionError) as caught:
        MappingTable.of([Entry("m", "h", COLUMN), Entry("m", "g", COLUMN), Entry("n", "h", ROW)], unused={"g": "why"})
    assert all(
        text in str(caught.value) for text in ("Megatron m appears", "Hugging Face h appears", "Hugging Face g appears")
    )


def test_coverage_lists_every_mismatch_at_once() -> None:
    table = MappingTable.of(
        [
            Entry("qkv", ("q", "k", "v"), COLUMN, FuseQKV(4, 2)),
            Entry("gone", "gone_hf", COLUMN),
            Entry("odd", "odd_hf", COLUMN),
            Entry("absent", "absent_hf", COLUMN),
        ],
        unused={"spare": "not used"},
    )
    hf = {"q": (8, 3), "k": (4, 3), "v": (6, 3), "odd_hf": (2, 2), "extra": (1,), "spare": (1,), "absent_hf": (1,)}
    megatron = {"qkv": (16, 3), "gone": (1,), "odd": (2, 3), "new": (1,)}
    with pytest.raises(ConversionError) as caught:
        check_coverage(table, hf_shapes=hf, megatron_shapes=megatron, source="FOLDER")
    text = str(caught.value)
    for part in (
        "FOLDER",
        "(6 problems)",
        "unknown to this model): extra (1,)",
        "tensor is missing: gone_hf",
        "parameter without an entry: new",
        "entry without a Megatron parameter: absent",
        "odd_hf (2, 2) gives (2, 2), but odd is (2, 3)",
        "v (6, 3)",
    ):
        assert part in text


def test_parts_of_other_shapes_whose_sum_fits_are_noticed() -> None:
    table = MappingTable.of([Entry("gated", ("gate", "up"), GATED_COLUMN, Concat(2))])
    with pytest.raises(
        ConversionError, match=r"gate is \(3, 2\), expected \(4, 2\)\n.*up is \(5, 2\), expected \(4, 2\)"
    ):
        check_coverage(table, hf_shapes={"gate": (3, 2), "up": (5, 2)}, megatron_shapes={"gated": (8, 2)}, source="x")


@pytest.mark.parametrize("wrong", [Shard(1), Shard(0), Shard(None)])
def test_a_wrong_gated_rule_shows(wrong: Shard) -> None:
    x = tensor(8, 4)
    assert not all(torch.equal(a, b) for a, b in zip(wrong.split(x, 2), GATED_COLUMN.split(x, 2), strict=True))
