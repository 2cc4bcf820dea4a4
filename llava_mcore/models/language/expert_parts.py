"""Which part of the matrices of all experts a rank has, in memory and in checkpoints.

e: experts of this rank, E: all experts.
"""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor


@dataclass(frozen=True)
class ExpertPart:
    """This rank's part of a tensor [E, rows, columns].

    `ep_rank` of `ep_size` ranks have different experts. `part` of `num_parts` ranks divide the tensor along
    `split_dim`; None: each has all of it. With two blocks along that dimension, gate and up, a rank has its part of the
    first and then its part of the second. `replica`: the place among the ranks that have the same.
    """

    ep_rank: int
    ep_size: int
    part: int
    num_parts: int
    replica: int
    split_dim: int | None
    num_blocks: int = 1

    @classmethod
    def of(cls, groups: ProcessGroupCollection, split_dim: int | None, num_blocks: int = 1) -> ExpertPart:
        """Return that of the calling rank. groups: its `ep`, `expt_tp` and `expt_dp` are used."""
        places = groups.ep.rank(), groups.ep.size(), groups.expt_tp.rank(), groups.expt_tp.size(), groups.expt_dp.rank()
        return cls(*places, split_dim, num_blocks)

    def cut(self, full: Tensor) -> Tensor:
        """Return this rank's part of the matrices of all experts."""
        local = full.chunk(self.ep_size)[self.ep_rank]
        if self.split_dim is None or self.num_parts == 1:
            return local
        blocks = local.chunk(self.num_blocks, self.split_dim)
        return torch.cat([block.chunk(self.num_parts, self.split_dim)[self.part] for block in blocks], self.split_dim)

    def sharded(self, name: str, tensor: Tensor, offsets: tuple[Any, ...] = ()) -> ShardedTensor | ShardedTensorFactory:
        """Return the part for a checkpoint. offsets: places along dimensions that are put before these.

        If ranks divide gate and up, each has rows in both halves of every matrix, so that these are tensors of their
        own.
        """
        lead, is_undivided = len(offsets), self.split_dim is None or self.num_parts == 1
        replica = (0, self.part if self.split_dim is None else 0, self.replica)
        if self.num_blocks == 1 or is_undivided:
            places = [(lead, self.ep_rank, self.ep_size)]
            if self.split_dim is not None:
                places.append((lead + self.split_dim, self.part, self.num_parts))
            return ShardedTensor.from_rank_offsets(
                name, tensor, *offsets, *places, replica_id=replica, prepend_axis_num=lead
            )
        assert self.split_dim == 1
        return self._in_blocks(name, tensor, offsets, replica)

    def _in_blocks(
        self, name: str, tensor: Tensor, offsets: tuple[Any, ...], replica: tuple[int, int, int]
    ) -> ShardedTensorFactory:
        """Return a tensor for each half of each matrix, which a load puts together again."""
        num_local, num_blocks, lead = len(tensor), self.num_blocks, len(offsets)

        # A save: experts and halves are two axes before the matrix's own.
        @torch.no_grad()
        def build(key: str, stack: Tensor, replica_id: Any, _flattened_range: Any) -> list[ShardedTensor]:
            blocks = [
                ((self.ep_rank * num_local + expert, block), rows)
                for expert, matrix in enumerate(stack.split(1))
                for block, rows in enumerate(matrix.chunk(num_blocks, dim=1))
            ]
            return [
                ShardedTensor.from_rank_offsets(
                    key,
                    rows,
                    *offsets,
                    (lead, expert, self.ep_size * num_local),
                    (lead + 1, block * self.num_parts + self.part, num_blocks * self.num_parts),
                    replica_id=replica_id,
                    prepend_axis_num=lead,
                )
                for (expert, block), rows in blocks
            ]

        @torch.no_grad()
        def merge(blocks: list[Tensor]) -> Tensor:
            return torch.cat([torch.cat(blocks[i : i + num_blocks], 1) for i in range(0, len(blocks), num_blocks)])

        return ShardedTensorFactory(name, tensor, build, merge, replica)
