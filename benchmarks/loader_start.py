"""What loader processes of packed training cost until the first batches: CPU time, and memory that they do not share.

    python -m benchmarks.loader_start --processes 4 --json out.json

The process that starts them imports what a training process on a CPU imports; one with Transformer Engine and a model
holds more. "private MiB" is the mean of the processes' memory that no other process shares. Linux only.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import psutil
import torch
import transformers.models.llava.modeling_llava  # noqa: F401  as a training process has it

import llava_mcore.training.loop  # noqa: F401
from benchmarks.material import make_shards
from benchmarks.record import show, write_record
from benchmarks.shapes import make_hf_folder
from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.data.loader.train_loader import TrainLoader


def main() -> None:
    """Parse the command line, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        row = measure(Path(work), args.processes)
    show([row])
    if args.json is not None:
        write_record(args.json, [row], gpus=0)


def measure(folder: Path, processes: int) -> dict[str, float]:
    """Open a loader, take two batches of each process, and look at the processes."""
    make_hf_folder(folder / "hf", "tiny", seq_length=4096)
    make_shards(folder / "data", num_samples=200, num_pictures=8)
    data = DataConfig(path=folder / "data", seq_length=4096, num_workers=processes, packing=True)
    begin, own = time.perf_counter(), cpu_seconds()
    loader = TrainLoader(data, load_assets(folder / "hf"), micro_batch_size=1, dp_rank=0, dp_size=1, seed=1)
    for _ in range(2 * processes):
        next(loader)
    children = psutil.Process().children()
    private = [child.memory_full_info().uss for child in children]
    row = {
        "processes": len(children),
        "seconds": round(time.perf_counter() - begin, 1),
        "CPU s of the training process": round(cpu_seconds() - own, 1),
        "CPU s of the loader processes": round(sum(sum(child.cpu_times()[:2]) for child in children), 1),
        "private MiB": round(sum(private) / len(private) / 2**20),
    }
    loader.close()
    return row


def cpu_seconds() -> float:
    """Return the CPU time of this process."""
    times = os.times()
    return times.user + times.system


if __name__ == "__main__":
    main()
