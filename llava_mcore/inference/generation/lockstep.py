"""Model replicas that share experts run the same number of passes, whatever each of them has to answer."""

from __future__ import annotations

from enum import IntEnum

import torch
import torch.distributed as dist

from llava_mcore.parallel.groups import Groups


class State(IntEnum):
    """How far a replica is; the highest one of all replicas counts."""

    DONE = 0
    BUSY = 1
    FAILED = 2


class Lockstep:
    """The agreement of replicas before every pass; nothing, where each has all experts."""

    def __init__(self, groups: Groups) -> None:
        self._control = groups.control if groups.replicas_share_experts else None

    def agree(self, state: State) -> State:
        """Return the highest state of all replicas; a collective call of all ranks, if replicas share experts.

        After BUSY every replica runs one pass, one that is done an empty one. After DONE or FAILED none runs any more.
        """
        if self._control is None:
            return state
        highest = torch.tensor(int(state))
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self._control)
        return State(int(highest))
