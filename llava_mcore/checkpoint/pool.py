"""The same function over many jobs, here or in several processes; results in the order of the jobs."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait

import torch

from llava_mcore.errors import ConversionError

_PRELOAD = ["llava_mcore.checkpoint.import_jobs", "llava_mcore.checkpoint.export_jobs"]


def run_jobs[Job, Result](function: Callable[[Job], Result], jobs: Sequence[Job], *, workers: int) -> Iterator[Result]:
    """Yield `function(job)` for every job.

    Args:
        function: a module's function; its module should import little, since each process does so.
        workers: number of processes; 1 works in this one.

    An error of a job is raised here; jobs that have not begun are dropped. Raises ConversionError if a worker dies.
    """
    if workers == 1 or len(jobs) < 2:
        with _one_thread():
            yield from map(function, jobs)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    pool = ProcessPoolExecutor(min(workers, len(jobs)), context, initializer=_start_worker)
    try:
        yield from pool.map(function, jobs)
    except BrokenProcessPool as error:
        raise ConversionError("a worker process ended suddenly; was it killed, for want of memory?") from error
    finally:
        pool.shutdown(cancel_futures=True)


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Copies are bound by memory: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _start_worker() -> None:
    torch.set_num_threads(1)
    _end_with_parent(timeout=0)  # it may be gone already, and its first job still in the pipe
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent(timeout: float | None = None) -> None:
    """A conversion that is killed must not go on writing: leave as soon as the parent is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    if wait([parent.sentinel], timeout):
        os._exit(1)
