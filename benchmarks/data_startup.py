"""Seconds from the start of a process to its first batch, over a simulated index of 20 million samples.

    python -m benchmarks.data_startup --json out.json

2000 shards of 10 000 samples each are links to a few real ones; what is opened, read and checked is what 2000 different
files would cost, but for the disk: the system knows the few files' contents after the first time. A new process imports
what a training process imports, checks the data as run.py does, loads tokenizer and image processor, and takes batches
from the loader with default settings. Needs scikit-learn.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

STEPS = ("imports", "check", "tokenizer", "loader", "first batch", "all streams")


def child(options: argparse.Namespace) -> None:
    """Open everything as training does, and print when each step was done."""
    import torch

    from llava_mcore.config.sections.data import DataConfig
    from llava_mcore.data.encode.assets import load_assets
    from llava_mcore.data.loader.train_loader import TrainLoader
    from llava_mcore.data.storage.dataset_path import check_dataset

    torch.set_num_threads(1)
    done = [time.time()]
    check_dataset(options.path)
    done.append(time.time())
    assets = load_assets(options.hf)
    done.append(time.time())
    data = DataConfig(path=options.path, num_workers=options.workers, packing=options.packing, seq_length=4096)
    loader = TrainLoader(data, assets, micro_batch_size=4, dp_rank=0, dp_size=options.dp_size, seed=1)
    done.append(time.time())
    next(loader)
    done.append(time.time())
    for _ in range(loader.num_streams // options.dp_size - 1):
        next(loader)
    done.append(time.time())
    loader.close()
    print(json.dumps(done), file=sys.__stdout__, flush=True)


def measure(path: Path, hf: Path, *flags: str) -> dict[str, float]:
    """Return the seconds of each step of a new process."""
    command = [sys.executable, "-m", "benchmarks.data_startup", "--child", str(path), "--hf", str(hf), *flags]
    begin = time.time()
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    times = [begin, *json.loads(output.splitlines()[-1])]
    return {step: after - before for step, (before, after) in zip(STEPS, itertools.pairwise(times), strict=True)}


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
    parser.add_argument("--num-shards", type=int, default=2000)
    parser.add_argument("--samples-per-shard", type=int, default=10_000)
    parser.add_argument("--dp-size", type=int, default=1, help="data-parallel ranks, of which one is measured")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    parser.add_argument("--child", dest="path", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--hf", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--packing", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.path is not None:
        child(options)
        return
    console, rows = Console(width=120), []
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(sys.stderr):
            path, hf = make_data(Path(folder), options.num_shards, options.samples_per_shard)
        number = options.num_shards * options.samples_per_shard
        console.print(f"{number:,} samples in {options.num_shards} shards; {os.cpu_count()} cores")
        table = Table("workers", "packing", *STEPS, "to the first batch", "load")
        for workers in (0, 2):
            for packing in (False, True):
                flags = ["--workers", str(workers), "--dp-size", str(options.dp_size)]
                found = measure(path, hf, *flags, *(["--packing"] if packing else []))
                total = sum(found[step] for step in STEPS[:-1])
                rows.append({"workers": workers, "packing": packing, **found, "total": total, "load": os.getloadavg()})
                figures = [f"{found[step]:.1f}" for step in STEPS]
                packs = "yes" if packing else "no"
                table.add_row(str(workers), packs, *figures, f"{total:.1f} s", f"{os.getloadavg()[0]:.1f}")
        console.print(table)
    if options.json is not None:
        options.json.write_text(json.dumps({"samples": number, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
