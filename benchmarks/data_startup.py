"""CPU seconds from the start of a process to its first batch, cost of a position and memory, over 20 million samples.

    python -m benchmarks.data_startup --json out.json

20,000 shards of 1,000 samples each are links to a few real ones; what is opened, read and checked is what 20,000
different files would cost, except for the disk: the system knows the few files' contents after the first time. A new
process imports what a training process imports, checks the data as run.py does, loads tokenizer and image processor,
and takes batches from the loader. Steps are CPU seconds of the process and its loader processes. Needs scikit-learn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

STEPS = ("imports", "preflight", "tokenizer", "loader", "first batch")
MEASURED_AFTER = (100, 900, 2000)
"""Batches after which positions and memory are measured. By the second, each of the 768 streams has had its first."""


def cpu_seconds() -> float:
    """Return the CPU time of this process and its children."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def memory() -> float:
    """Return the MiB that this process and its loader processes hold and share with no other process."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(process.memory_full_info().uss for process in processes) / 2**20


def child(options: argparse.Namespace) -> None:
    """Open everything as training does, and print what each step cost."""
    import torch

    from llava_mcore.config.sections.data import DataConfig
    from llava_mcore.data.encode.assets import load_assets
    from llava_mcore.data.loader.train_loader import TrainLoader
    from llava_mcore.data.storage.dataset_path import check_dataset

    torch.set_num_threads(1)
    done = [0.0, cpu_seconds()]
    check_dataset(options.path)
    done.append(cpu_seconds())
    assets = load_assets(options.hf)
    done.append(cpu_seconds())
    data = DataConfig(path=options.path, num_workers=options.workers, packing=options.packing, seq_length=4096)
    loader = TrainLoader(data, assets, micro_batch_size=1, dp_rank=0, dp_size=options.dp_size, seed=1)
    done.append(cpu_seconds())
    next(loader)
    done.append(cpu_seconds())
    row = {step: after - before for step, before, after in zip(STEPS, done[:-1], done[1:], strict=True)}
    done_before = 0
    for count in MEASURED_AFTER:
        for _ in range(count - done_before):
            next(loader)
        done_before = count
        row |= {f"position ms, {count}": position_ms(loader), f"memory MiB, {count}": memory()}
    loader.close()
    print(json.dumps(row), file=sys.__stdout__, flush=True)


def position_ms(loader: object) -> float:
    """Return the milliseconds of the position of one stream, as every batch brings it."""
    from llava_mcore.data.loader.train_loader import TrainLoader

    assert isinstance(loader, TrainLoader)
    begin = time.process_time()
    for _ in range(20):
        json.dumps(loader.state())
    return 1000 * (time.process_time() - begin) / 20 / loader.num_streams


def measure(path: Path, hf: Path, *flags: str) -> dict[str, float]:
    """Return the figures of a new process."""
    command = [sys.executable, "-m", "benchmarks.data_startup", "--child", str(path), "--hf", str(hf), *flags]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    row: dict[str, float] = json.loads(output.splitlines()[-1])
    return row


def make_data(root: Path, num_shards: int, samples_per_shard: int) -> tuple[Path, Path]:
    """Return the simulated dataset and the Hugging Face folder."""
    from benchmarks.data_material import make_hf_assets, make_pictures, make_samples, multiply
    from benchmarks.material import write_shards

    hf = make_hf_assets(root / "hf", image_size=336, seq_length=4096)
    samples = make_samples(4 * samples_per_shard, make_pictures([(96, 64)], 64), text_only=0.1, median_tokens=40)
    real = write_shards(root / "real", samples, num_shards=4)
    return multiply(real, root / "many", num_shards), hf


def main() -> None:
    """Make the data, start one process after the other, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--num-shards", type=int, default=20_000)
    parser.add_argument("--samples-per-shard", type=int, default=1000)
    parser.add_argument("--dp-size", type=int, default=1, help="data-parallel ranks, of which one is measured")
    parser.add_argument("--num-workers", type=int, nargs="+", default=[0, 2], help="numbers of loader processes")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    parser.add_argument("--child", dest="path", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--hf", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--packing", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.path is not None:
        child(options)
        return
    console, rows = Console(width=200), []
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(sys.stderr):
            path, hf = make_data(Path(folder), options.num_shards, options.samples_per_shard)
        total = options.num_shards * options.samples_per_shard
        console.print(f"{total:,} samples in {options.num_shards:,} shards; {os.cpu_count()} cores; CPU seconds")
        for workers in options.num_workers:
            for packing in (False, True):
                flags = ["--workers", str(workers), "--dp-size", str(options.dp_size)]
                row = measure(path, hf, *flags, *(["--packing"] if packing else []))
                rows.append({"workers": workers, "packing": packing, **row})
        table = Table("workers", "packing", *[name for name in rows[0] if name not in ("workers", "packing")])
        for entry in rows:
            workers, packing, *values = entry.values()
            table.add_row(str(workers), "yes" if packing else "no", *(f"{value:.3g}" for value in values))
        console.print(table)
    if options.json is not None:
        options.json.write_text(json.dumps({"samples": total, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
