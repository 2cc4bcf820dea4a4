"""Shard rules: how a full Megatron tensor is split over tensor-parallel ranks and joined again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llava_mcore.errors import ConversionError


@dataclass(frozen=True)
class Shard:
    """Split along `dim` (None: every rank holds the whole tensor).

    With `blocks` > 1 each of the equal blocks along `dim` is split separately and every rank gets its part
    of each: SwiGLU's [gate; up] becomes [gate_r; up_r] on rank r.
    """

    dim: int | None
    blocks: int = 1

    def split(self, full: Tensor, tp_size: int) -> list[Tensor]:
        """Return the slice of every tensor-parallel rank, in rank order.

        Raises:
            ConversionError: the size is not divisible.
        """
        if self.dim is None or tp_size == 1:
            return [full] * tp_size
        size = full.shape[self.dim]
        if size % (tp_size * self.blocks):
            raise ConversionError(
                f"a tensor of shape {tuple(full.shape)} cannot be split along dim {self.dim} into "
                f"{self.blocks} block(s) x tp {tp_size}: {size} is not a multiple of {tp_size * self.blocks}"
            )
        cut = [block.chunk(tp_size, self.dim) for block in full.chunk(self.blocks, self.dim)]
        return [torch.cat(parts, self.dim) for parts in zip(*cut, strict=True)]

    def join(self, slices: Sequence[Tensor]) -> Tensor:
        """Inverse of `split`: the slices of every rank, in rank order, back to the full tensor."""
        if self.dim is None:
            return slices[0]
        by_block = zip(*(x.chunk(self.blocks, self.dim) for x in slices), strict=True)
        return torch.cat([torch.cat(parts, self.dim) for parts in by_block], self.dim)


REPLICATED = Shard(None)
COLUMN = Shard(0)
ROW = Shard(1)
GATED_COLUMN = Shard(0, blocks=2)
