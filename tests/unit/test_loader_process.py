"""Who may end a loader process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from llava_mcore.data.loader_process import start_loader_process


class Numbers(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 100


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who sent a signal")
def test_only_the_training_process_ends_it() -> None:
    loader = DataLoader(Numbers(), batch_size=1, num_workers=1, worker_init_fn=start_loader_process, timeout=30)
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
