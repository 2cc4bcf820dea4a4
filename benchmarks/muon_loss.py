"""Muon against AdamW: the loss over some hundred steps on real shards, all runs at the same time.

    python -m benchmarks.muon_loss --iters 300 --lr 1e-4 3e-4 --json out.json
    python -m benchmarks.muon_loss --hf-dir llava-1.5-7b-hf --data-path shards --iters 300 --lr 1e-5 2e-5

Weights start equal (one seed, or those of --hf-dir), samples come in one order, and each optimizer gets each rate.
Prints the loss of the first steps, after a third and at the end, and the time of a step. Without --hf-dir a model of
--shape is trained from random weights. With `--gpus N` each run has so many GPUs and shards its optimizer over them;
runs take turns where there are not enough GPUs.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.material import make_shards
from benchmarks.record import ROOT, show, write_record
from benchmarks.runs import ending_with_us, parse_with_overrides, read_lines, training_command
from benchmarks.shapes import SHAPES, make_hf_folder

OPTIMIZERS = ("adamw", "muon")
LAST = 50
Run = tuple[str, float]
"""Optimizer and rate."""


def main() -> None:
    """Train with both optimizers and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llava-1b")
    parser.add_argument("--hf-dir", type=Path, help="train this model instead of a random one")
    parser.add_argument("--data-path", type=Path, help="shards, for --hf-dir; without it made ones")
    parser.add_argument("--iters", type=int, default=300)
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of each run")
    parser.add_argument("--micro-batch-size", type=int, default=4, help="packs of a GPU's step")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-4, 3e-4])
    parser.add_argument("--json", type=Path)
    args = parse_with_overrides(parser)
    runs = [(name, lr) for lr in args.lr for name in OPTIMIZERS]
    at_once = max(1, torch.cuda.device_count() // args.gpus)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        start = _prepare(args, folder)
        data = args.data_path or make_shards(
            folder / "data", num_samples=12 * args.iters * args.micro_batch_size * args.gpus
        )
        for first in range(0, len(runs), at_once):
            started = [_start(args, folder, start, data, run, i) for i, run in enumerate(runs[first : first + at_once])]
            for process in started:
                if process.wait() != 0:
                    raise SystemExit(f"{process.args}: exit code {process.returncode}")
        lines = {run: read_lines(folder / "out" / _name(run) / "metrics.jsonl") for run in runs}
    rows = [summarize(run, found) for run, found in lines.items()]
    show(rows)
    if args.json is not None:
        write_record(args.json, rows, gpus=torch.cuda.device_count())


def _prepare(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Return the flags that say which weights a run begins with."""
    if args.hf_dir is None:
        make_hf_folder(folder / "hf", args.shape, seq_length=4096)
        return {"--tokenizer-load-dir": folder / "hf"}
    convert = [sys.executable, "-m", "llava_mcore", "import-hf", "--tp", "1", "--pp", "1"]
    subprocess.run([*convert, "--hf-dir", args.hf_dir, "--megatron-dir", folder / "megatron"], cwd=ROOT, check=True)
    return {"--tokenizer-load-dir": args.hf_dir, "--megatron-load-dir": folder / "megatron"}


def _start(
    args: argparse.Namespace, folder: Path, start: dict[str, object], data: Path, run: Run, place: int
) -> subprocess.Popen[bytes]:
    """Start a run on the next GPUs."""
    name, lr = run
    options = {
        "-g": args.gpus,
        **start,
        "--data-path": data,
        "--save-dir": folder / "out",
        "--name": _name(run),
        "--train-iters": args.iters,
        "--seq-length": 4096,
        "--micro-batch-size": args.micro_batch_size,
        "--global-batch-size": args.micro_batch_size * args.gpus,
        "--lr": lr,
    }
    first = ["--dist-optim", *([] if "--megatron-load-dir" in start else ["--init"])]
    command = training_command(options, *first, f"optimizer.name={name}", *args.more)
    devices = range(place * args.gpus, (place + 1) * args.gpus)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
    return subprocess.Popen(ending_with_us(command), cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)


def _name(run: Run) -> str:
    return f"{run[0]}-{run[1]:g}"


def summarize(run: Run, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a run; its speed is that of the last steps."""
    losses, last = [line["loss"] for line in lines], lines[-LAST:]
    return {
        "optimizer": run[0],
        "rate": run[1],
        "steps": len(lines),
        "not finite": sum(loss is None or not math.isfinite(loss) for loss in losses),
        "first loss": round(losses[0], 4),
        "loss at a third": round(statistics.mean(losses[len(losses) // 3 :][:LAST]), 4),
        f"mean of the last {LAST}": round(statistics.mean(losses[-LAST:]), 4),
        "seconds of a step": round(statistics.median(line["step_seconds"] for line in last), 4),
    }


if __name__ == "__main__":
    main()
