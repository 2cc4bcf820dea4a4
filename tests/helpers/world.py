"""Spawn a world of gloo processes that run one function each; a world costs about ten seconds of imports."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    """Return a port nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_world(size: int, function: str, *, timeout: float = 300, **arguments: Any) -> list[Any]:
    """Run `package.module:function(**arguments)` on `size` ranks and return what each returned.

    Raises AssertionError with the output of all ranks when one fails or the time is up.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder)
        torch.save({"function": function, "arguments": arguments}, job / "job.pt")
        env = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE=str(size))
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        logs = [(job / f"log{rank}").open("w+") for rank in range(size)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.helpers.world", str(job)],
                env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=logs[rank],
                stderr=subprocess.STDOUT,
                cwd=ROOT,
            )
            for rank in range(size)
        ]
        codes = _wait(processes, timeout)
        if any(codes):
            texts = []
            for rank, log in enumerate(logs):
                log.seek(0)
                texts.append(f"--- rank {rank}, exit {codes[rank]}\n{log.read()[-4000:]}")
            raise AssertionError("\n".join(texts))
        return [torch.load(job / f"result{rank}.pt", weights_only=False) for rank in range(size)]


def _wait(processes: list[subprocess.Popen[bytes]], timeout: float) -> list[int]:
    """Wait for all; when one fails the others are ended, since they would wait for it."""
    import time

    end = time.monotonic() + timeout
    while any(p.poll() is None for p in processes):
        failed = any(p.poll() not in (None, 0) for p in processes)
        if failed or time.monotonic() > end:
            time.sleep(1)
            for p in processes:
                p.kill()
            break
        time.sleep(0.05)
    return [p.wait() for p in processes]


def _rank_main(job: Path) -> None:
    import importlib

    task = torch.load(job / "job.pt", weights_only=False)
    module, name = task["function"].split(":")
    result = getattr(importlib.import_module(module), name)(**task["arguments"])
    torch.save(result, job / f"result{os.environ['RANK']}.pt")


if __name__ == "__main__":
    _rank_main(Path(sys.argv[1]))
