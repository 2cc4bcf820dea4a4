"""Start a world of gloo processes that run one function each."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed import TCPStore

PRELOADED = ["tests.helpers.preload"]
"""Imported once by the server that the processes are forked from: importing costs each of them 5 to 8 seconds."""

LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (2, 2, 2)]
"""tp, pp, dp: each kind of parallelism by itself, and together with others."""


def free_port() -> int:
    """Return a free port below those that Linux assigns to connections (32768)."""
    while True:
        port = secrets.choice(range(20000, 32768))
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def run_world(
    size: int,
    function: Callable[..., Any],
    *,
    timeout: float = 1200,
    environment: Mapping[str, str] | None = None,
    **arguments: Any,
) -> list[Any]:
    """Run `function(**arguments)` on `size` ranks and return what each returned.

    `function`: one of a module, since ranks import it. `environment`: variables of the ranks, set before anything of
    CUDA starts.

    Raises AssertionError with the output of all ranks when one fails, when all hang, or when the time is up.
    """
    context = multiprocessing.get_context("forkserver")
    if not torch.cuda.is_available():  # a process that has looked for GPUs must not be forked
        context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder)
        torch.save({"function": function, "arguments": arguments}, job / "job.pt")
        # The store is here and not on rank 0, as with torchrun: ranks open connections through it until the end.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        processes = [
            context.Process(target=_rank_main, args=(job, {**own, **(environment or {})}))
            for own in rank_environments(size, store.port)
        ]
        for process in processes:
            process.start()
        codes = wait_for_ranks(processes, timeout)
        if any(codes):
            texts = [
                f"--- rank {rank}, exit {code}\n{_log(job, str(rank)).read_text(errors='replace')[-4000:]}"
                for rank, code in enumerate(codes)
            ]
            raise AssertionError("\n".join(texts))
        return [torch.load(job / f"result{rank}.pt", weights_only=False) for rank in range(size)]


def rank_environments(size: int, port: int) -> list[dict[str, str]]:
    """Return by rank how torch.distributed finds the others. `port`: of a store in this process."""
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    world |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    return [world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def wait_for_ranks(processes: list[BaseProcess], timeout: float, *, seconds_for_others: float = 1) -> list[int | None]:
    """Wait for all; when one fails the others are ended, since they would wait for it. So are ranks that do nothing."""
    end, watch = time.monotonic() + timeout, _Watch(processes)
    while any(p.exitcode is None for p in processes):
        failed = any(p.exitcode not in (None, 0) for p in processes)
        if failed or time.monotonic() > end or watch.hangs():
            found = time.monotonic()
            for p in processes:
                p.join(max(0.0, seconds_for_others - (time.monotonic() - found)))
                p.kill()
            break
        time.sleep(0.02)
    for p in processes:
        p.join()
    return [p.exitcode for p in processes]


class _Watch:
    """Tells ranks that all wait from ranks that are slow, because other tests run: the latter compute."""

    SECONDS, LEAST_CPU_SECONDS = 120, 0.5

    def __init__(self, processes: list[BaseProcess]) -> None:
        self._processes = processes
        self._since, self._used = time.monotonic(), dict[int, float]()

    def hangs(self) -> bool:
        """Return whether for SECONDS nothing has been computed."""
        if time.monotonic() < self._since + self.SECONDS:
            return False
        before, self._used, self._since = self._used, self._cpu_seconds(), time.monotonic()
        return sum(used - before.get(pid, 0.0) for pid, used in self._used.items()) < self.LEAST_CPU_SECONDS

    def _cpu_seconds(self) -> dict[int, float]:
        """Return what each rank that still runs has used, and each of its children."""
        used = {}
        for rank in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(rank.pid)
                for one in (process, *process.children(recursive=True)):
                    times = one.cpu_times()
                    used[one.pid] = float(times.user + times.system)
        return used


def write_output_to(file: Path, errors: Path | None = None) -> None:
    """Let this process and its children write what they print to a file, and their errors to it or to another one."""
    for number, path in ((1, file), (2, errors or file)):
        log = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, number)
        os.close(log)
    # Python's own have looked at what was there before: a file has positions, and a pipe has none.
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)


def _log(job: Path, rank: str) -> Path:
    return job / f"log{rank}"


def _rank_main(job: Path, world: dict[str, str]) -> None:
    os.environ.update(world)
    write_output_to(_log(job, world["RANK"]))
    torch.set_num_threads(1)
    task = torch.load(job / "job.pt", weights_only=False)
    result = task["function"](**task["arguments"])
    torch.save(result, job / f"result{world['RANK']}.pt")
