"""The plan of a save, which later saves of the same tensors reuse."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

from llava_mcore.checkpoint.sharded import structure
from llava_mcore.compat.megatron import SaveStrategy
from llava_mcore.parallel.groups import Groups, sum_over_ranks


class SavePlan:
    """Which rank writes what, and the metadata of all of it.

    For a new plan megatron-core checks that the ranks together write every tensor once. To do so, and to plan, every
    rank gets the names and shapes of the tensors of all ranks, which takes seconds in large worlds.
    """

    def __init__(self, groups: Groups | None = None) -> None:
        """groups: of the run; its data-parallel ranks divide writing what they all hold. None: every tensor is written
        by its first replica."""
        self.groups = groups
        self.strategy = self._new_strategy()
        self._planned: list[tuple[object, ...]] | None = None
        self._next: list[tuple[object, ...]] = []

    def begin(self, state: ShardedStateDict) -> bool:
        """Begin a save of `state`; a collective call.

        Returns:
            Whether it has to be planned: it is the first, or on some rank not what the last one was.
        """
        self._next = structure(state)
        is_new = self._next != self._planned
        if self.groups is not None:
            is_new = sum_over_ranks(self.groups, [is_new])[0] > 0
        if is_new:
            self._planned, self.strategy = None, self._new_strategy()
        return is_new

    def done(self) -> None:
        """Keep the plan of the save that has begun: all ranks have planned it."""
        self._planned = self._next

    def _new_strategy(self) -> SaveStrategy | FullyParallelSaveStrategyWrapper:
        # A wrapper around one replica would have nothing to divide, and check the plan in every save.
        if self.groups is None or self.groups.data_parallel.size() == 1:
            return SaveStrategy()
        return FullyParallelSaveStrategyWrapper(SaveStrategy(), self.groups.data_parallel, do_cache_distribution=True)
