"""Logging: INFO on rank 0, warnings of every rank with its number."""

from __future__ import annotations

import logging
import sys
import warnings

_NOISE = ("megatron.core", "torch.distributed", "transformers", "nvidia", "torch.utils")


def set_up(rank: int) -> None:
    """Send our own messages to stdout; libraries speak up from ERROR on."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"rank {rank}: %(message)s"))
    ours = logging.getLogger("llava_mcore")
    ours.handlers[:] = [handler]
    ours.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    ours.propagate = False
    quiet_libraries()


def quiet_libraries() -> None:
    """Let libraries speak from ERROR on: on a CPU they warn a page long about what is not there."""
    for name in _NOISE:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
