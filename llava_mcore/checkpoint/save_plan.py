"""The plan of a save, which later saves of the same tensors reuse."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

from llava_mcore.checkpoint.sharded import num_bytes, sharded_tensors, structure
from llava_mcore.compat.megatron.checkpoints import SaveStrategy
from llava_mcore.parallel.groups import Groups, sum_over_ranks

type _Structure = list[tuple[object, ...]]

MAX_FILES = 8
FILE_BYTES = 1 << 30
"""A rank that writes more writes several files, up to `MAX_FILES`: each in a thread of its own."""


class SaveAssignment:
    """Which rank writes what, and the metadata of all of it.

    A new plan takes seconds in large worlds: megatron-core sends every rank the names and shapes of all ranks' tensors,
    and checks that together they write every tensor once.
    """

    def __init__(self, groups: Groups | None = None) -> None:
        """groups: the run's; its data-parallel ranks share the writing of tensors that they all hold. None: every
        tensor is written by its first replica."""
        self.groups = groups
        self.strategy: SaveStrategy | FullyParallelSaveStrategyWrapper = SaveStrategy()
        self._planned: _Structure | None = None
        self._divided: _Structure | None = None
        """The structure that `strategy` was made for."""
        self._next: _Structure = []

    @property
    def is_planned(self) -> bool:
        """Whether there has been a save; the same on all ranks."""
        return self._planned is not None

    def divide(self, state: ShardedStateDict) -> list[ShardedTensor]:
        """Decide before the first save which rank writes what; a collective call. Changes `state`.

        Returns:
            The tensors that this rank will write.
        """
        self._divided = structure(state)
        return self._new_strategy(state)

    def begin(self, state: ShardedStateDict) -> bool:
        """Begin a save of `state`; a collective call.

        Returns:
            Whether it has to be planned: it is the first one, or the state differs from the last one's on some rank.
        """
        self._next = structure(state)
        is_new, is_undivided = self._next != self._planned, self._next != self._divided
        if self.groups is not None:
            is_new, is_undivided = (n > 0 for n in sum_over_ranks(self.groups, [is_new, is_undivided]))
        if is_new:
            self._planned = None
            if is_undivided:
                self._divided = self._next
                self._new_strategy(state)
        return is_new

    def done(self) -> None:
        """Keep the plan of the save that has begun: all ranks have planned it."""
        self._planned = self._next

    def _new_strategy(self, state: ShardedStateDict) -> list[ShardedTensor]:
        """Choose a strategy; return the tensors that this rank writes. A collective call."""
        self.strategy = strategy = SaveStrategy()
        tensors = sharded_tensors(state)
        # A wrapper around one replica would have nothing to divide, and check the plan in every save.
        if self.groups is not None and self.groups.data_parallel.size() > 1:
            wrapper = FullyParallelSaveStrategyWrapper(strategy, self.groups.data_parallel, do_cache_distribution=True)
            wrapper.apply_saving_parallelization(dict(enumerate(tensors)))
            self.strategy = wrapper
        written = [x for x in tensors if x.data is not None and is_main_replica(x.replica_id)]
        strategy.thread_count = min(MAX_FILES, 1 + sum(map(num_bytes, written)) // FILE_BYTES)
        return written
