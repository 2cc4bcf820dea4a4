"""A checkpoint of one layout resumed at others: `run.py` itself, on a published shape.

    python -m benchmarks.resume_layouts --shape llava-1.5-13b --gpus 8 --save-at 2,2 --resume-at 2,2 4,1

Trains, saves weights and optimizer, resumes at each layout (tp,pp; data parallel over the rest) and trains on. Prints
the losses after the checkpoint and their largest difference from those of the first resumed layout: give the one that
saved first. Then prints the seconds of each phase between the start of a rank and the end of its first iteration.
A checkpoint has 14 bytes per trained parameter (bf16, AdamW); the disk holds one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.material import make_shards
from benchmarks.record import ROOT, show, write_record
from benchmarks.runs import ending_with_us, read_lines, training_command
from benchmarks.shapes import SHAPES, make_hf_folder


def main() -> None:
    """Train and save, resume at every layout, print the table."""
    args = parse()
    with tempfile.TemporaryDirectory(dir=args.dir) as work:
        folder = Path(work)
        make_hf_folder(folder / "hf", args.shape, seq_length=args.seq_length, num_layers=args.layers)
        make_shards(folder / "data", num_samples=args.samples)
        rows = [row_of(args, folder, "save", args.save_at)]
        for layout in args.resume_at:
            row = row_of(args, folder, "resume", layout)
            rows.append(row)
            pairs = zip(row["losses"], rows[1]["losses"], strict=True)
            row["loss off %"] = round(max(100 * abs(a / b - 1) for a, b in pairs), 3)
            show(rows, leave_out=("phases",))
            show([{"tp": x["tp"], "pp": x["pp"]} | x["phases"] for x in rows[1:]])
            if args.json is not None:  # what has been measured, in case the run is killed
                write_record(args.json, [_flat(x) for x in rows], gpus=args.gpus)


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with a column for each phase of the start, and their sum."""
    phases = row["phases"]
    rest = {name: value for name, value in row.items() if name != "phases"}
    return rest | phases | {"to the end of the first iteration": round(sum(phases.values()), 1)}


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llava-1b")
    parser.add_argument("--gpus", type=int, default=max(1, torch.cuda.device_count()), help="or gloo processes")
    parser.add_argument("--save-at", default="1,1", help="tp,pp")
    parser.add_argument("--resume-at", nargs="+", default=["1,1"], help="tp,pp; the others are compared with the first")
    parser.add_argument("--steps", type=int, default=5, help="before the checkpoint")
    parser.add_argument("--more", type=int, default=5, help="iterations after it")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="packs of one forward pass")
    parser.add_argument("--global-batch-size", type=int, default=16, help="packs of one step")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--layers", type=int, help="shorten the decoder")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--dir", type=Path, help="folder for data and checkpoint (default: the temporary one)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value overrides of the run's configuration")
    return parser.parse_args()


def row_of(args: argparse.Namespace, folder: Path, what: str, layout: str) -> dict[str, Any]:
    """Train up to the checkpoint, or continue from it; return the losses and how long it took."""
    tp, pp = layout.split(",")
    options = {
        "-g": args.gpus,
        "--tp": tp,
        "--pp": pp,
        "--tokenizer-load-dir": folder / "hf",
        "--data-path": folder / "data",
        "--save-dir": folder,
        "--name": "run",
        "--train-iters": args.steps if what == "save" else args.steps + args.more,
        "--seq-length": args.seq_length,
        "--micro-batch-size": args.micro_batch_size,
        "--global-batch-size": args.global_batch_size,
        "--num-workers": 2,
        "--on-too-long": "truncate",
        "--lr-decay-style": "constant",
    }
    flags = ["--save", "--save-optim"] if what == "save" else ["--load-optim"]
    command = training_command(options, "--init", "--dist-optim", *flags, *args.overrides)
    start = time.perf_counter()
    subprocess.run(ending_with_us(command), cwd=ROOT, check=True, stdout=sys.stderr)
    found = {"run": what, "tp": int(tp), "pp": int(pp), "dp": args.gpus // (int(tp) * int(pp))}
    found |= {"seconds, start included": round(time.perf_counter() - start, 1)}
    steps = args.steps if what == "save" else args.more
    lines = read_lines(folder / "run" / "metrics.jsonl")[-steps:]
    found["phases"] = {phase: round(seconds, 1) for phase, seconds in lines[0]["start_seconds"].items()}
    return found | {"losses": [round(line["loss"], 5) for line in lines]}


if __name__ == "__main__":
    main()
