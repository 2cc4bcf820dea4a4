"""How a checkpoint that is written in the background affects training: `run.py` itself, on a published shape.

    python -m benchmarks.async_save --shape llava-1.5-7b --gpus 2 --tp 2 --steps 40 --dir /fast/disk --json out.json

After `--steps` steps a save begins in the background, and as many steps follow, during and after it, then a second one
and as many again; the save of the last step is waited for. The host memory of the saves is allocated and pinned during
the first steps, which do not count. "step" is the median wall time of a step without any save beside it, the data wait
included; "step beside a save" are the steps that ended before the tracker moved. "waited" is how long training paused.
With weights and optimizer, a checkpoint has 14 bytes per trained parameter (bf16, AdamW): LLaVA-1.5-7B about 98 GB. The
disk holds one: each is deleted when it is complete. The host's memory holds one too, while it is written.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.material import make_shards
from benchmarks.record import ROOT, write_record
from benchmarks.runs import ending_with_us, parse_with_overrides, read_lines, training_command
from benchmarks.shapes import SHAPES, make_hf_folder
from llava_mcore.checkpoint.layout import iteration_folder

SAVES, METRICS = "saves.jsonl", "metrics.jsonl"


def main() -> int:
    """Train, measure, print; return the exit code of the run."""
    args = parse()
    with tempfile.TemporaryDirectory(dir=args.dir) as work:
        folder = Path(work)
        make_hf_folder(folder / "hf", args.shape, seq_length=args.seq_length, num_layers=args.layers)
        make_shards(folder / "data", num_samples=args.samples)
        code = watched(command(args, folder), folder / "run")
        if code:
            return code
        steps, saves = read_lines(folder / "run" / METRICS), read_lines(folder / "run" / SAVES)
    found = measured(steps, saves, args.warm_up)
    show(args, found)
    if args.json is not None:
        write_record(args.json, rows(args, found), gpus=args.gpus)
    return 0


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llava-1b")
    parser.add_argument("--gpus", type=int, default=max(1, torch.cuda.device_count()), help="or gloo processes")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30, help="before a save begins; three times as many in all")
    parser.add_argument("--warm-up", type=int, default=5, help="first steps that do not count")
    parser.add_argument("--weights-only", action="store_true", help="save no optimizer: 2 bytes per parameter")
    parser.add_argument("--plain-optimizer", action="store_true", help="not the distributed one")
    parser.add_argument("--train-vision", action="store_true", help="also train the vision tower")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="packs of one forward pass")
    parser.add_argument("--global-batch-size", type=int, default=16, help="packs of one step")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--layers", type=int, help="shorten the decoder")
    parser.add_argument("--samples", type=int, default=4000, help="conversations in the shards, read again and again")
    parser.add_argument("--dir", type=Path, help="folder for data and checkpoints (default: the temporary one)")
    parser.add_argument("--json", "--out", type=Path)
    return parse_with_overrides(parser)


def command(args: argparse.Namespace, folder: Path) -> list[str]:
    """Return the training's command line."""
    options = {
        "-g": args.gpus,
        "--tp": args.tp,
        "--pp": args.pp,
        "--tokenizer-load-dir": folder / "hf",
        "--data-path": folder / "data",
        "--save-dir": folder,
        "--name": "run",
        "--train-iters": 3 * args.steps,
        "--save-interval": args.steps,
        "--seq-length": args.seq_length,
        "--micro-batch-size": args.micro_batch_size,
        "--global-batch-size": args.global_batch_size,
        "--num-workers": 4,
        "--on-too-long": "truncate",
    }
    flags = ["--init", "--async-save", *([] if args.plain_optimizer else ["--dist-optim"])]
    flags += [] if args.weights_only else ["--save-optim"]
    return training_command(options, *flags, f"model.freeze_vision_model={not args.train_vision}", *args.more)


def watched(words: Sequence[str], run_dir: Path) -> int:
    """Run the training; delete its checkpoints as soon as they are complete. Return the exit code."""
    with subprocess.Popen(ending_with_us(words), cwd=ROOT) as process:
        while process.poll() is None:
            time.sleep(0.5)
            for save in read_lines(run_dir / SAVES):
                folder = iteration_folder(run_dir, save["iteration"])
                if save["background"] and folder.exists():
                    # Outside the run's folder, in which the run deletes checkpoints itself.
                    shutil.rmtree(folder.rename(run_dir.parent / folder.name))
    return process.returncode


def measured(steps: Sequence[dict[str, Any]], saves: Sequence[dict[str, Any]], warm_up: int) -> dict[str, Any]:
    """Return how long the saves took, and how much slower the steps during background saves were. Seconds, GB, GB/s.

    Args:
        saves: those in the background, in order, and the last one, that was waited for.
    """
    spans = [range(save["iteration"] + 1, save["finished_after_iteration"] + 1) for save in saves[:-1]]
    seconds = {step["iteration"]: step["step_seconds"] for step in steps if step["iteration"] > warm_up}
    beside = [value for number, value in seconds.items() if any(number in span for span in spans)]
    alone = [value for number, value in seconds.items() if not any(number in span for span in spans)]
    if not beside or not alone:
        raise SystemExit(f"no steps beside a save, or none without it: {len(beside)}, {len(alone)}; raise --steps")
    normal = statistics.median(alone)
    return {
        "step": {"median": normal, "max": max(alone), "number": len(alone)},
        "step beside a save": {
            "median": statistics.median(beside),
            "max": max(beside),
            "mean": statistics.mean(beside),
            "number": len(beside),
        },
        "ratio": statistics.median(beside) / normal,
        "mean ratio": statistics.mean(beside) / statistics.mean(alone),
        "saves": [save | {"gb_per_second": save["gigabytes"] / save["seconds"]} for save in saves],
    }


def rows(args: argparse.Namespace, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each save: GB, GB/s, seconds, and seconds of steps beside saves and without any."""
    layout = {"shape": args.shape, "tp": args.tp, "pp": args.pp, "dp": args.gpus // (args.tp * args.pp)}
    number = itertools.count(1)
    return [
        layout
        | {
            "save": f"{next(number)}, in the background" if save["background"] else "last, waited for",
            "GB": round(save["gigabytes"], 1),
            "until complete s": round(save["seconds"], 2),
            "GB/s": round(save["gb_per_second"], 2),
            "waited at its start s": round(save["start_waited_seconds"], 2),
            "waited at its end s": round(save["finish_waited_seconds"], 2),
            "step without a save s": round(found["step"]["median"], 3),
            "step beside a save s": round(found["step beside a save"]["median"], 3),
        }
        for save in found["saves"]
    ]


def show(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Print steps and saves as two tables."""
    what = "weights" if args.weights_only else "weights and optimizer"
    title = f"{args.shape}, tp {args.tp} x pp {args.pp} x dp {args.gpus // (args.tp * args.pp)}"
    steps = Table("steps", "median s", "max s", "number", "ratio of medians", "of means", title=title)
    for name, ratios in (("step", ("", "")), ("step beside a save", (found["ratio"], found["mean ratio"]))):
        row = found[name]
        texts = [f"{value:.3f}" if value else "" for value in ratios]
        steps.add_row(name, f"{row['median']:.3f}", f"{row['max']:.3f}", str(row["number"]), *texts)
    saves = Table("save", "GB", "until complete s", "GB/s", "waited at its start s", "at its end s", title=what)
    for row in found["saves"]:
        numbers = ("gigabytes", "seconds", "gb_per_second", "start_waited_seconds", "finish_waited_seconds")
        name = "in the background" if row["background"] else "waited for"
        saves.add_row(name, *(f"{row[number]:.2f}" for number in numbers))
    console = Console(width=120)
    console.print(steps)
    console.print(saves)


if __name__ == "__main__":
    sys.exit(main())
