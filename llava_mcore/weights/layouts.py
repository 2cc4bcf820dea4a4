"""Layouts: how Hugging Face tensors become one full Megatron tensor. Each is an exact inverse pair.

A new case is a new small class here with its inverse test, never a branch in the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class TensorTransform(Protocol):
    """`to_hf(to_megatron(*x)) == x`, bit for bit, for every dtype."""

    def to_megatron(self, *hf: Tensor) -> Tensor: ...

    def to_hf(self, megatron: Tensor) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True)
class Copy:
    """The same tensor on both sides."""

    def to_megatron(self, *hf: Tensor) -> Tensor:
        (x,) = hf
        return x

    def to_hf(self, megatron: Tensor) -> tuple[Tensor, ...]:
        return (megatron,)


@dataclass(frozen=True)
class Reshape:
    """The same values with another shape (CLIP's class token: [h] and [1, 1, h])."""

    hf_shape: tuple[int, ...]
    megatron_shape: tuple[int, ...]

    def to_megatron(self, *hf: Tensor) -> Tensor:
        (x,) = hf
        return x.reshape(self.megatron_shape)

    def to_hf(self, megatron: Tensor) -> tuple[Tensor, ...]:
        return (megatron.reshape(self.hf_shape),)


@dataclass(frozen=True)
class FuseQKV:
    """q [heads*d, ...], k and v [groups*d, ...] and one tensor [(heads + 2*groups)*d, ...].

    Megatron's order is group by group: the group's query heads, then its key, then its value, so that
    splitting dim 0 over tensor-parallel ranks gives each rank whole groups.
    """

    heads: int
    groups: int

    def to_megatron(self, *hf: Tensor) -> Tensor:
        by_group = [x.unflatten(0, (self.groups, -1)) for x in hf]
        return torch.cat(by_group, dim=1).flatten(0, 1)

    def to_hf(self, megatron: Tensor) -> tuple[Tensor, ...]:
        head_dim = megatron.shape[0] // (self.heads + 2 * self.groups)
        sizes = [self.heads // self.groups * head_dim, head_dim, head_dim]
        by_group = megatron.unflatten(0, (self.groups, -1)).split(sizes, dim=1)
        return tuple(x.flatten(0, 1) for x in by_group)


@dataclass(frozen=True)
class FuseGatedQKV:
    """q and its gate [heads*2*d, ...], head by head the query, then the gate; k and v [groups*d, ...]; and one tensor
    [2*(heads + groups)*d, ...].

    Megatron's order is group by group: the group's query heads, then their gates, its key and its value.
    """

    heads: int
    groups: int

    def to_megatron(self, *hf: Tensor) -> Tensor:
        both, key, value = hf
        per_group = self.heads // self.groups
        by_head = both.unflatten(0, (self.groups, per_group, 2, -1))
        query, gate = by_head.transpose(1, 2).unbind(1)  # [groups, heads of a group, d, ...]
        of_groups = [x.unflatten(0, (self.groups, 1, -1)) for x in (key, value)]
        return torch.cat([query, gate, *of_groups], dim=1).flatten(0, 2)

    def to_hf(self, megatron: Tensor) -> tuple[Tensor, ...]:
        per_group = self.heads // self.groups
        by_group = megatron.unflatten(0, (self.groups, 2 * per_group + 2, -1))
        query, gate, key, value = by_group.split([per_group, per_group, 1, 1], dim=1)
        return torch.stack([query, gate], dim=2).flatten(0, 3), key.flatten(0, 2), value.flatten(0, 2)


@dataclass(frozen=True)
class FuseQV:
    """q and v [heads*d] and one bias [3*heads*d] in FuseQKV's order, whose keys are zero: files have none for them."""

    heads: int

    def to_megatron(self, *hf: Tensor) -> Tensor:
        query, value = hf
        return FuseQKV(self.heads, self.heads).to_megatron(query, torch.zeros_like(value), value)

    def to_hf(self, megatron: Tensor) -> tuple[Tensor, ...]:
        query, _, value = FuseQKV(self.heads, self.heads).to_hf(megatron)
        return query, value


@dataclass(frozen=True)
class Regroup:
    """[(heads + 2*groups)*d, ...] on both sides: all queries, all keys, all values in files; then FuseQKV's order."""

    heads: int
    groups: int

    def to_megatron(self, *hf: Tensor) -> Tensor:
        (x,) = hf
        head_dim = x.shape[0] // (self.heads + 2 * self.groups)
        sizes = [self.heads * head_dim, self.groups * head_dim, self.groups * head_dim]
        return FuseQKV(self.heads, self.groups).to_megatron(*x.split(sizes))

    def to_hf(self, megatron: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat(FuseQKV(self.heads, self.groups).to_hf(megatron)),)


@dataclass(frozen=True)
class Concat:
    """`num_parts` tensors of the same shape, concatenated along dim 0 (SwiGLU: gate, up)."""

    num_parts: int

    def to_megatron(self, *hf: Tensor) -> Tensor:
        return torch.cat(hf, dim=0)

    def to_hf(self, megatron: Tensor) -> tuple[Tensor, ...]:
        return megatron.chunk(self.num_parts, dim=0)


@dataclass(frozen=True)
class ConcatRows:
    """Tensors with these numbers of rows, concatenated along dim 0."""

    rows: tuple[int, ...]

    def to_megatron(self, *hf: Tensor) -> Tensor:
        return torch.cat(hf, dim=0)

    def to_hf(self, megatron: Tensor) -> tuple[Tensor, ...]:
        return megatron.split(self.rows, dim=0)


@dataclass(frozen=True)
class StackExperts:
    """`num_parts` matrices [rows, columns] of every expert, expert by expert, and one tensor
    [experts, num_parts * rows, columns]."""

    num_experts: int
    num_parts: int

    def to_megatron(self, *hf: Tensor) -> Tensor:
        return torch.cat(hf, dim=0).unflatten(0, (self.num_experts, -1))

    def to_hf(self, megatron: Tensor) -> tuple[Tensor, ...]:
        return tuple(x for expert in megatron.unbind(0) for x in expert.chunk(self.num_parts, dim=0))


@dataclass(frozen=True)
class TransposeExperts:
    """[experts, inputs, outputs] and [experts, outputs, inputs]."""

    def to_megatron(self, *hf: Tensor) -> Tensor:
        (x,) = hf
        return x.transpose(1, 2).contiguous()

    def to_hf(self, megatron: Tensor) -> tuple[Tensor, ...]:
        return (megatron.transpose(1, 2).contiguous(),)


@dataclass(frozen=True)
class PadRows:
    """[rows, ...] and [padded_rows, ...]: zero rows at the end, dropped on export (vocabulary)."""

    rows: int
    padded_rows: int

    def to_megatron(self, *hf: Tensor) -> Tensor:
        (x,) = hf
        return torch.cat([x, x.new_zeros(self.padded_rows - self.rows, *x.shape[1:])])

    def to_hf(self, megatron: Tensor) -> tuple[Tensor, ...]:
        return (megatron[: self.rows],)


@dataclass(frozen=True)
class PadParts:
    """`num_parts` tensors [rows, ...], each with zero rows at its end, concatenated along dim 0 (padded MLPs)."""

    num_parts: int
    rows: int
    padded_rows: int

    def to_megatron(self, *hf: Tensor) -> Tensor:
        pad = PadRows(self.rows, self.padded_rows)
        return torch.cat([pad.to_megatron(x) for x in hf])

    def to_hf(self, megatron: Tensor) -> tuple[Tensor, ...]:
        return tuple(x[: self.rows] for x in megatron.chunk(self.num_parts, dim=0))


@dataclass(frozen=True)
class PadColumns:
    """[n, columns] and [n, padded_columns]: zero columns at the end, dropped on export."""

    columns: int
    padded_columns: int

    def to_megatron(self, *hf: Tensor) -> Tensor:
        (x,) = hf
        return torch.cat([x, x.new_zeros(x.shape[0], self.padded_columns - self.columns)], dim=1)

    def to_hf(self, megatron: Tensor) -> tuple[Tensor, ...]:
        return (megatron[:, : self.columns],)
