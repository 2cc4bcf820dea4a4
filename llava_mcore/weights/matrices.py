"""The matrices in a fused Megatron tensor, which an optimizer of whole matrices must split.

Megatron stores queries, keys and values of a layer as one tensor, and so gate and up of an MLP, the parts of a delta
net's first matrix, and the matrices of all experts. Files may have some of them fused too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llava_mcore.weights.layouts import Concat, ConcatRows, Copy, FuseGatedQKV, FuseQKV, Regroup, TensorTransform
from llava_mcore.weights.table import Entry

_LINEAR_LAYERS = frozenset(
    {
        "encoder",
        "in_proj",
        "linear_fc1",
        "linear_fc2",
        "linear_k",
        "linear_proj",
        "linear_q",
        "linear_qkv",
        "linear_v",
        "out_proj",
    }
)
"""Modules whose weight multiplies hidden states. Embeddings, tables of positions, patch embeddings, latents, routers,
convolutions and the output layer have other names."""


def is_matrix(entry: Entry) -> bool:
    """Return whether an entry is the weight of a linear layer inside the model."""
    *_, module, name = entry.megatron.split(".")
    return name == "weight" and module in _LINEAR_LAYERS


def matrices_in(entry: Entry) -> TensorTransform:
    """Return the layout whose `to_hf` gives the matrices of an entry, apart; those of all experts come as one tensor
    [experts, rows, columns]. The entry must be a matrix."""
    layout, shard = entry.layout, entry.shard
    if shard.experts:
        return _StackedBlocks(shard.blocks)
    if shard.sections:
        return ConcatRows(shard.sections)
    if isinstance(layout, Regroup):
        return FuseQKV(layout.heads, layout.groups)
    if isinstance(layout, FuseGatedQKV):
        return _GatedQKV(layout.heads, layout.groups)
    if isinstance(layout, Copy) and shard.blocks > 1:
        return Concat(shard.blocks)
    return layout


@dataclass(frozen=True)
class _StackedBlocks:
    """[experts, rows, columns] for each of `num_blocks`, and [experts, num_blocks * rows, columns]."""

    num_blocks: int

    def to_megatron(self, *hf: Tensor) -> Tensor:
        return torch.cat(hf, dim=1)

    def to_hf(self, megatron: Tensor) -> tuple[Tensor, ...]:
        return megatron.chunk(self.num_blocks, dim=1)


@dataclass(frozen=True)
class _GatedQKV:
    """q and its gate [heads*d, ...] each, k and v [groups*d, ...], and FuseGatedQKV's one tensor."""

    heads: int
    groups: int

    def to_megatron(self, *hf: Tensor) -> Tensor:
        return torch.cat([x.unflatten(0, (self.groups, -1)) for x in hf], dim=1).flatten(0, 1)

    def to_hf(self, megatron: Tensor) -> tuple[Tensor, ...]:
        per_group = self.heads // self.groups
        by_group = megatron.unflatten(0, (self.groups, 2 * per_group + 2, -1))
        parts = by_group.split([per_group, per_group, 1, 1], dim=1)
        return tuple(x.flatten(0, 2) for x in parts)
