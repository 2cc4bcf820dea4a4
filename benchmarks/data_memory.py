"""Memory of the loader processes while many samples go through them: it must not grow."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.loader.train_loader import TrainLoader

MIB = 2**20


@dataclass(frozen=True)
class WorkerMemory:
    """Of one loader process, in MiB: proportional set size (shared pages count by share) and resident set size.

    The slope is of a line through the second half of the measurements, in MiB for 100 000 samples of all processes.
    """

    first_pss: float
    last_pss: float
    highest_pss: float
    last_rss: float
    slope: float


def memory_over_samples(
    path: Path, assets: Assets, *, samples: int, workers: int, seq_length: int, packing: bool
) -> tuple[list[WorkerMemory], float]:
    """Take this many samples; return each loader process's memory and the samples per second."""
    data = DataConfig(path=path, seq_length=seq_length, num_workers=workers, packing=packing)
    loader = TrainLoader(data, assets, micro_batch_size=1 if packing else 4, dp_rank=0, dp_size=1, seed=1)
    for _ in range(4 * loader.num_streams):  # all buffers are full
        next(loader)
    processes = psutil.Process().children()
    begin, seen, measured = time.perf_counter(), 0, list[tuple[int, list[tuple[float, float]]]]()
    every = max(1, samples // 100)
    while seen < samples:
        seen += len(next(loader).sample_keys)
        if seen >= every * len(measured):
            found = [process.memory_full_info() for process in processes]
            measured.append((seen, [(m.pss / MIB, m.rss / MIB) for m in found]))
    rate = seen / (time.perf_counter() - begin)
    loader.close()
    numbers = np.array([number for number, _ in measured])
    half = len(numbers) // 2
    result = []
    for process in range(len(processes)):
        pss = np.array([memory[process][0] for _, memory in measured])
        slope = float(np.polyfit(numbers[half:], pss[half:], 1)[0]) * 100_000
        result.append(WorkerMemory(pss[0], pss[-1], pss.max(), measured[-1][1][process][1], slope))
    return result, rate
