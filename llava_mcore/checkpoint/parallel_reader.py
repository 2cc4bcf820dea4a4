"""Reads a torch_dist checkpoint with several threads: one thread decodes 1 to 2 GB/s, however fast the disk is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from llava_mcore.parallel.cores import cores_per_rank, run_jobs

MAX_THREADS = 8
JOB_BYTES = 256 << 20
"""A thread opens a file once for so many bytes, or for a single larger tensor."""


class ParallelReader(FileSystemReader):
    """torch's reader; each thread reads other tensors with it."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read everything in `plan`.

        Raises:
            Exception: as torch's reader raises them, the first of any thread's.
        """
        read, before = super().read_data, torch.get_num_threads()
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def read_job(items: list[ReadItem]) -> None:
            if device is not None:
                torch.cuda.set_device(device)  # a thread starts with the first GPU
            read(replace(plan, items=items), planner)

        try:
            for _ in run_jobs(read_job, list(self._jobs(plan)), workers=min(MAX_THREADS, cores_per_rank())):
                pass
        finally:
            torch.set_num_threads(before)  # the jobs set a number that MKL applies to the whole process
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _jobs(self, plan: LoadPlan) -> Iterator[list[ReadItem]]:
        """Yield lists of items that are in one file, in the order of the file, of about `JOB_BYTES` each."""
        stored = self.storage_data
        job: list[ReadItem] = []
        num_bytes, path = 0, None
        for item in sorted(
            plan.items, key=lambda x: (stored[x.storage_index].relative_path, stored[x.storage_index].offset)
        ):
            info = stored[item.storage_index]
            if job and (info.relative_path != path or num_bytes >= JOB_BYTES):
                yield job
                job, num_bytes = [], 0
            job.append(item)
            num_bytes, path = num_bytes + info.length, info.relative_path
        if job:
            yield job
