"""Agreement of all ranks on whether any of them has a problem."""

from __future__ import annotations

import datetime
import logging

import torch
import torch.distributed as dist

from llava_mcore.parallel.groups import Groups

logger = logging.getLogger(__name__)

_SOON = datetime.timedelta(seconds=1)


def agree(groups: Groups, problem: str | None) -> list[str]:
    """Return the problems of all ranks on every rank; an empty list if there are none. A collective call.

    A rank with a problem logs it when others do not come soon: they may take long, or wait for it elsewhere.
    """
    messages = agree_in_time(groups, problem, None)
    assert messages is not None, "it waits for all"
    return messages


def agree_in_time(groups: Groups, problem: str | None, patience: datetime.timedelta | None) -> list[str] | None:
    """Like `agree`; None on a rank with a problem that the others have not met within `patience`."""
    failed = torch.tensor([problem is not None], dtype=torch.int32)
    work = dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=groups.agreement, async_op=True)
    if problem is not None and not _is_done(work, _SOON):
        logger.warning("%s\n(waiting for the other ranks)", problem)
        if patience is not None and not _is_done(work, patience):
            return None
    work.wait()
    if not failed.item():
        return []
    gathered: list[str | None] = [None] * groups.world_size
    dist.all_gather_object(gathered, problem, group=groups.agreement)
    return [f"rank {rank}: {text}" for rank, text in enumerate(gathered) if text is not None]


def _is_done(work: dist.Work, limit: datetime.timedelta) -> bool:
    try:
        work.wait(limit)
    except RuntimeError:  # gloo's, for the limit as for a lost connection
        return False
    return True
