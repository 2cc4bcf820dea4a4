"""The cores of this machine that a rank may use: torchrun gives each one thread, which copies host memory slowly."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch


def run_jobs[Job, Result](function: Callable[[Job], Result], jobs: Sequence[Job], *, workers: int) -> Iterator[Result]:
    """Yield `function(job)` for every job.

    An error in a job is raised here; jobs that have not started are dropped.
    """
    # Copies are bound by memory bandwidth: more torch threads per worker would only wait for each other.
    pool = ThreadPoolExecutor(workers, "convert", initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield from pool.map(function, jobs)
    finally:
        pool.shutdown(cancel_futures=True)


def usable_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0))


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
