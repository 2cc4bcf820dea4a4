"""Training speed of published LLaVA shapes: `run.py` itself on real shards, any layout, BF16 and FP8.

    python benchmarks/train_step.py --shape llava-1.5-7b --layouts 1,1 2,1 --fp8 none delayed --json out.json

Prints tokens/s, TFLOP/s and MFU for each GPU (wall time with data wait, real tokens, dense BF16 peak), memory and fill.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.material import SHAPES, make_hf_folder, make_shards

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = (
    "shape",
    "tp",
    "pp",
    "dp",
    "fp8",
    "mbs",
    "gbs",
    "tok/s/GPU",
    "TF/s/GPU",
    "MFU %",
    "s/step",
    "wait %",
    "fill",
    "GiB",
)


def main() -> None:
    args = parse()
    rows = []
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        folder = Path(work)
        data = make_shards(folder / "data", num_samples=args.samples)
        for shape in args.shape:
            make_hf_folder(folder / shape, shape, seq_length=args.seq_length, num_layers=args.layers)
            for layout in args.layouts:
                for fp8 in args.fp8:
                    row = measure(args, folder, data, shape, layout, fp8)
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    show(rows)
    if args.json is not None:
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "command": sys.argv}
        args.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1), encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["llava-1b"])
    parser.add_argument("--layouts", nargs="+", default=["1,1"], help="tp,pp; data parallel over the rest")
    parser.add_argument("--fp8", nargs="+", default=["none"], choices=["none", "delayed", "tensorwise", "blockwise"])
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--micro-batch-size", type=int, default=1, help="packs of one forward pass")
    parser.add_argument("--global-batch-size", type=int, default=16, help="packs of one step")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--layers", type=int, help="shorten the decoder")
    parser.add_argument("--iters", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=4, help="first iterations that do not count")
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--train-vision", action="store_true", help="also train the vision tower")
    parser.add_argument("--work", type=Path, help="folder for the data (default: the system's temporary one)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("more", nargs="*", help="key=value overrides of the run's configuration")
    return parser.parse_args()


def measure(args: argparse.Namespace, folder: Path, data: Path, shape: str, layout: str, fp8: str) -> dict[str, Any]:
    """Run one configuration and return its row; an error becomes the row's text."""
    tp, pp = (int(x) for x in layout.split(","))
    name = f"{shape}-{layout}-{fp8}-{time.time_ns()}"
    command = [sys.executable, str(ROOT / "scripts" / "train" / "run.py")]
    command += ["-g", str(args.gpus), "--tp", str(tp), "--pp", str(pp), "--dist-optim", "--init", "--packing"]
    command += [
        "--tokenizer-load-dir",
        str(folder / shape),
        "--data-path",
        str(data),
        "--save-dir",
        str(folder / "out"),
    ]
    command += ["--name", name, "--train-iters", str(args.iters), "--seq-length", str(args.seq_length)]
    command += ["--micro-batch-size", str(args.micro_batch_size), "--global-batch-size", str(args.global_batch_size)]
    command += [
        "--num-workers",
        "4",
        "data.shuffle_buffer_size=0",
        f"model.freeze_vision_model={not args.train_vision}",
    ]
    command += ["--fp8", "--fp8-recipe", fp8] if fp8 != "none" else []
    result = subprocess.run([*command, *args.more], cwd=ROOT, capture_output=True, text=True, check=False)
    row: dict[str, Any] = {"shape": shape, "tp": tp, "pp": pp, "dp": args.gpus // (tp * pp), "fp8": fp8}
    row |= {"mbs": args.micro_batch_size, "gbs": args.global_batch_size}
    if result.returncode:
        return row | {"error": (result.stdout + result.stderr)[-3000:]}
    lines = (folder / "out" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines][args.warm_up :]
    seconds = statistics.median(step["step_seconds"] for step in steps)
    return row | {
        "tok/s/GPU": round(statistics.median(s["tokens_per_second"] for s in steps) / args.gpus),
        "TF/s/GPU": round(statistics.median(s["tflops_per_device"] for s in steps), 1),
        "MFU %": round(100 * statistics.median(s["mfu"] or 0.0 for s in steps), 1),
        "s/step": round(seconds, 3),
        "wait %": round(100 * statistics.median(s["data_wait_seconds"] for s in steps) / seconds, 1),
        "fill": round(statistics.median(s["fill"] for s in steps), 4),
        "GiB": round(steps[-1]["memory_gib"] or 0.0, 1),
        "loss": [round(json.loads(line)["loss"], 3) for line in lines],
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(*COLUMNS)
    for row in rows:
        table.add_row(*[str(row.get(column, "-")) for column in COLUMNS])
    Console(width=160).print(table)
    for row in rows:
        if "error" in row:
            print(f"{row['shape']} tp {row['tp']} pp {row['pp']} fp8 {row['fp8']}:\n{row['error']}")


if __name__ == "__main__":
    main()
