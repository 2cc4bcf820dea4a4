"""FP8 against BF16: the loss over some hundred steps on real shards, all at the same time.

    python -m benchmarks.fp8_loss --iters 300 --json out.json

Weights start equal (one seed), samples come in one order. Prints how far each recipe's mean loss is from BF16's, over
all steps and over the last fifty, and whether any step was not finite. "tensorwise, ends in bf16" keeps the first and
the last decoder layer in BF16. "bf16 again" is BF16 with a learning rate that is higher by a hundred-thousandth: it
rounds differently, and shows how far runs diverge that differ in nothing else.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.material import make_shards
from benchmarks.record import ROOT, show, write_record
from benchmarks.runs import RECIPES, ending_with_us, read_lines, training_command
from benchmarks.shapes import SHAPES, make_hf_folder

AGAIN = "bf16 again"
ENDS = ("training.fp8_first_layers_bf16=1", "training.fp8_last_layers_bf16=1")
RUNS: dict[str, tuple[str, ...]] = {
    "bf16": (),
    **{recipe: ("--fp8", "--fp8-recipe", recipe) for recipe in RECIPES},
    "tensorwise, ends in bf16": ("--fp8", "--fp8-recipe", "tensorwise", *ENDS),
    AGAIN: (),
}
"""Name -> what is added to the first one's command."""
LAST = 50


def main() -> None:
    """Train with every recipe and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llava-1b")
    parser.add_argument("--iters", type=int, default=300)
    parser.add_argument("--micro-batch-size", type=int, default=4, help="packs of a step")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        make_hf_folder(folder / "hf", args.shape, seq_length=4096)
        data = make_shards(folder / "data", num_samples=12 * args.iters * args.micro_batch_size)
        started = [start(args, folder, data, recipe, gpu) for gpu, recipe in enumerate(RUNS)]
        for process in started:
            if process.wait() != 0:
                raise SystemExit(f"{process.args}: exit code {process.returncode}")
        metrics = {recipe: folder / "out" / folder_of(recipe) / "metrics.jsonl" for recipe in RUNS}
        rows = summarize({recipe: [line["loss"] for line in read_lines(file)] for recipe, file in metrics.items()})
    show(rows)
    if args.json is not None:
        write_record(args.json, rows, gpus=torch.cuda.device_count())


def start(args: argparse.Namespace, folder: Path, data: Path, recipe: str, gpu: int) -> subprocess.Popen[bytes]:
    """Start the run of a recipe on the next GPU; where there are fewer GPUs, runs share them."""
    options = {
        "-g": 1,
        "--tokenizer-load-dir": folder / "hf",
        "--data-path": data,
        "--save-dir": folder / "out",
        "--name": folder_of(recipe),
        "--train-iters": args.iters,
        "--seq-length": 4096,
        "--micro-batch-size": args.micro_batch_size,
        "--global-batch-size": args.micro_batch_size,
        "--lr": args.lr * (1 + 1e-5) if recipe == AGAIN else args.lr,
    }
    command = training_command(options, "--init", *RUNS[recipe])
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu % torch.cuda.device_count())}
    return subprocess.Popen(ending_with_us(command), cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)


def folder_of(recipe: str) -> str:
    """Return the name of a recipe's run."""
    return recipe.replace(",", "").replace(" ", "-")


def summarize(losses: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return a row for each recipe; differences are relative to BF16's mean loss."""
    base = losses["bf16"]
    return [
        {
            "recipe": recipe,
            "steps": len(found),
            "not finite": sum(not math.isfinite(loss) for loss in found),
            "first loss": round(found[0], 4),
            f"mean of the last {LAST}": round(statistics.mean(found[-LAST:]), 4),
            "difference, all": f"{100 * (statistics.mean(found) / statistics.mean(base) - 1):+.2f} %",
            "difference, last": f"{100 * (statistics.mean(found[-LAST:]) / statistics.mean(base[-LAST:]) - 1):+.2f} %",
        }
        for recipe, found in losses.items()
    ]


if __name__ == "__main__":
    main()
