"""The cores of this machine that a rank may use: torchrun gives each one thread, which copies host memory slowly."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from llava_mcore.files.thread_pool import usable_cores


def cores_per_rank() -> int:
    """Return this rank's share of the cores, at least 1."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's
    return max(1, usable_cores() // ranks)


@contextlib.contextmanager
def all_cores() -> Iterator[None]:
    """Let torch use this rank's share of the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, cores_per_rank()))
    try:
        yield
    finally:
        torch.set_num_threads(before)
