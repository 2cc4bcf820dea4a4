"""Who may end a loader process."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from llava_mcore.data.loader.loader_process import loader_process_init


class Numbers(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 100


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who sent a signal")
def test_only_the_training_process_ends_it() -> None:
    loader = DataLoader(Numbers(), batch_size=1, num_workers=1, worker_init_fn=loader_process_init(), timeout=30)
    reading = iter(loader)
    (process,) = reading._workers  # type: ignore[attr-defined]
    first = [int(next(reading)) for _ in range(3)]
    for name in ("TERM", "USR1", "INT"):
        subprocess.run(["kill", f"-{name}", str(process.pid)], check=True)  # as SLURM does
    assert first + [int(next(reading)) for _ in range(20)] == list(range(23))
    assert process.is_alive()
    process.terminate()  # as torch does with a process that does not end when it is asked to
    process.join(timeout=10)
    assert process.exitcode == 0
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        for _ in range(100):
            torch.as_tensor(next(reading))


ORPHANS = """
import socket, sys, time
import torch
from torch.utils.data import DataLoader, Dataset
from llava_mcore.data.loader import loader_process

class Large(Dataset):
    def __getitem__(self, index):
        return b"x" * (1 << 20)  # more than a pipe holds: the process is stuck in writing

    def __len__(self):
        return 100

if sys.argv[1] == "without the kernel":
    loader_process.die_with_parent = lambda number, parent: None
server = socket.create_server(("127.0.0.1", 0))
loader = DataLoader(Large(), batch_size=None, num_workers=1, prefetch_factor=8, multiprocessing_context="fork",
                    worker_init_fn=loader_process.loader_process_init())
reading = iter(loader)
next(reading)
time.sleep(0.5)
print(reading._workers[0].pid, server.getsockname()[1], flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
@pytest.mark.parametrize("way", ["with the kernel", "without the kernel"])
def test_it_ends_with_the_training_process_even_if_nobody_takes_what_it_has_read(way: str) -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHANS, way], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid, port = map(int, process.stdout.readline().split())
        orphan = psutil.Process(pid)
        held = [x.laddr.port for x in orphan.net_connections()]
        process.kill()
    assert held == [], f"it keeps port {port} of the training process open"
    assert psutil.wait_procs([orphan], timeout=10)[1] == []
