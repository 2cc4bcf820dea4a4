"""Comparing a checkpoint with its checksums: by one process, or by all ranks together."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch.distributed as dist

from llava_mcore.checkpoint.checksums import by_size, damaged_files, recorded
from llava_mcore.errors import CheckpointError, problems
from llava_mcore.parallel.agreement import agree
from llava_mcore.parallel.groups import Groups

logger = logging.getLogger(__name__)

HOW_TO_SKIP = "with --no-verify-checkpoint, train and export-hf read it anyway"


def require_undamaged(checkpoint: Path) -> str:
    """Compare every file of a checkpoint with its checksum, in this process; return a line about it.

    Raises:
        CheckpointError: lists every damaged file.
    """
    start = time.perf_counter()
    expected = recorded(checkpoint)
    if expected is None:
        return f"{checkpoint} has no checksums: it cannot be verified (written by another program or an older version)"
    damaged = damaged_files(checkpoint, {name: expected[name] for name in by_size(checkpoint, expected)})
    if damaged:
        raise CheckpointError(problems(f"{checkpoint} is damaged or has been changed ({HOW_TO_SKIP})", damaged))
    return f"{checkpoint}: {_verified(len(expected), time.perf_counter() - start)}"


def damage_found_together(groups: Groups, checkpoint: Path) -> str | None:
    """Like `require_undamaged`, but every rank reads a share of the files; a collective call.

    Returns:
        What is wrong, the same on all ranks; None if the files are undamaged.
    """
    start = time.perf_counter()
    problem: str | None = None
    sent: list[dict[str, str] | None] = [None]
    if groups.rank == 0:
        try:
            expected = recorded(checkpoint)
            sent = [expected and {name: expected[name] for name in by_size(checkpoint, expected)}]
        except CheckpointError as error:
            problem = str(error)
    dist.broadcast_object_list(sent, src=0, group=groups.control)
    (files,) = sent
    if files is not None:
        local_names = list(files)[groups.rank :: groups.world_size]
        problem = "; ".join(damaged_files(checkpoint, {name: files[name] for name in local_names})) or None
    messages = agree(groups, problem)
    if messages:
        return "; ".join(text.partition(": ")[2] for text in messages) + f" ({HOW_TO_SKIP})"
    if files is None:
        logger.info("%s has no checksums: not verified (written by another program or an older version)", checkpoint)
    else:
        logger.info("%s: %s", checkpoint, _verified(len(files), time.perf_counter() - start))
    return None


def _verified(count: int, seconds: float) -> str:
    return f"{count} files match their checksums ({seconds:.1f} s)"
