"""Training speed of published LLaVA shapes: `run.py` itself on real shards, any layout, BF16 and FP8.

    python -m benchmarks.train_step --shape llava-1.5-7b --layouts 1,1 2,1 --fp8 none delayed --json out.json
    python -m benchmarks.train_step --shape llava-1.5-7b --micro-batch-size 2 --global-batch-size 24 \\
        --fp8 none delayed --peer hf hf-padded --rounds 2

Prints tokens/s, TFLOP/s and MFU for each GPU (wall time with data wait, real tokens, dense BF16 peak), memory, fill and
"÷ first", tokens/s as a multiple of the first configuration's. With --weights all layouts load the same weights (random
ones differ by layout), and "loss off %" is how far the losses of the steps are at most from the first configuration's,
which reads the same samples. With --bubble one more step of each pipelined layout is profiled: "bubble %" is what the
first stage waited for the others, "predicted %" what it should be (`benchmarks/read_trace.py`), of the time of all
passes. With --peer also a Hugging Face stack (`benchmarks/hf_peer.py`) on the same shards, and the ratios to it.
Configurations take turns, as many rounds as asked for; medians over the steps of all rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from benchmarks import read_trace
from benchmarks.material import MIXED_SIZES, ONEVISION, SHAPES, make_hf_folder, make_shards, make_weights
from benchmarks.record import ROOT, show, write_record
from benchmarks.runs import RECIPES, read_lines, training_command
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.flops import TrainedParts, Workload, mfu, model_flops, peak_flops

LOADERS = 4
"""Loader processes of a rank."""
PEERS = {"hf": "Hugging Face, packed", "hf-padded": "Hugging Face, padded"}


@dataclass
class Entry:
    """One configuration and the steps that were measured of it."""

    shape: str
    what: str
    """fp8 recipe of ours, or the peer."""
    tp: int
    pp: int
    micro_batch_size: int
    global_batch_size: int
    steps: list[dict[str, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    bubbles: list[float] = field(default_factory=list)
    """Measured, parts of the time of all passes."""
    error: str = ""

    @property
    def is_peer(self) -> bool:
        return self.what in PEERS


def main() -> None:
    """Measure every configuration in turns and print the table."""
    args = parse()
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        folder = Path(work)
        sizes = MIXED_SIZES if set(args.shape) & set(ONEVISION) else ((640, 480),)
        data = make_shards(folder / "data", num_samples=args.samples, sizes=sizes)
        entries = []
        for shape in args.shape:
            make_hf_folder(folder / shape, shape, seq_length=args.seq_length, num_layers=args.layers)
            entries += planned(args, shape)
            if args.weights:
                make_weights(folder / shape)
                convert = [sys.executable, "-m", "llava_mcore", "import-hf", "--hf-dir", folder / shape]
                subprocess.run([*convert, "--megatron-dir", folder / f"{shape}-megatron"], cwd=ROOT, check=True)
        for number in range(args.rounds):
            for place, entry in enumerate(entries):
                if not entry.error:
                    run = peer if entry.is_peer else ours
                    run(args, entry, folder, data, folder / f"{place}-{number}")
                    print(json.dumps(row_of(args, entry, entries)), flush=True)
                    write(args, entries)
    show([row_of(args, entry, entries) for entry in entries], leave_out=("loss", "error"))
    for entry in entries:
        if entry.error:
            print(f"{entry.shape} {entry.what} tp {entry.tp} pp {entry.pp}:\n{entry.error}")


def write(args: argparse.Namespace, entries: Sequence[Entry]) -> None:
    """Write what has been measured so far, so that a run that is cut off leaves its first rows."""
    if args.json is not None:
        rows = [row_of(args, entry, entries) for entry in entries if entry.steps or entry.error]
        write_record(args.json, rows, gpus=args.gpus)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["llava-1b"])
    parser.add_argument(
        "--layouts", nargs="+", default=["1,1"], help="tp,pp or tp,pp,micro-batch size; data parallel over the rest"
    )
    parser.add_argument("--fp8", nargs="+", default=["none"], choices=["none", *RECIPES])
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--micro-batch-size", type=int, default=1, help="packs of one forward pass")
    parser.add_argument("--global-batch-size", type=int, default=16, help="packs of one step")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--layers", type=int, help="shorten the decoder")
    parser.add_argument("--iters", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=4, help="first iterations that do not count")
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--lr", type=float, default=1e-5, help="ours and the peers', from the first step to the last")
    parser.add_argument("--train-vision", action="store_true", help="also train the vision tower")
    parser.add_argument(
        "--weights", action="store_true", help="all layouts begin with the same weights, imported first"
    )
    parser.add_argument("--bubble", action="store_true", help="profile one step more where pp > 1")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--peer", nargs="+", choices=PEERS, default=[], help="compare with a Hugging Face stack")
    parser.add_argument("--peer-micro-batch-size", type=int, default=3, help="packs; recomputes nothing")
    parser.add_argument("--padded-micro-batch-size", type=int, default=16, help="samples; recomputes decoder layers")
    parser.add_argument("--padded-micro-batches", type=int, default=4, help="of a step of the padded peer")
    parser.add_argument("--work", type=Path, help="folder for the data (default: the system's temporary one)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("more", nargs="*", help="key=value overrides of our run's configuration")
    args = parser.parse_args()
    micro_batch_sizes = {size for _, _, size in sizes(args)}
    bad = [size for size in micro_batch_sizes if args.global_batch_size % (size * streams(args))]
    if args.weights and len(micro_batch_sizes) > 1 and bad:
        parser.error(
            "layouts with unequal micro-batch sizes read the same samples in a step only if --global-batch-size is a "
            f"multiple of each times the {streams(args)} streams of the data, which it is not for {bad}"
        )
    return args


def sizes(args: argparse.Namespace) -> list[tuple[int, int, int]]:
    """Return tp, pp and micro-batch size of every layout."""
    layouts = [tuple(int(x) for x in layout.split(",")) for layout in args.layouts]
    return [(tp, pp, more[0] if more else args.micro_batch_size) for tp, pp, *more in layouts]


def planned(args: argparse.Namespace, shape: str) -> list[Entry]:
    """Return the configurations of a shape: ours, then the peers."""
    entries = [Entry(shape, fp8, *size, args.global_batch_size) for size in sizes(args) for fp8 in args.fp8]
    padded = (args.padded_micro_batch_size, args.padded_micro_batch_size * args.padded_micro_batches * args.gpus)
    packed = (args.peer_micro_batch_size, args.global_batch_size)
    return entries + [Entry(shape, name, 1, 1, *(padded if name == "hf-padded" else packed)) for name in args.peer]


def streams(args: argparse.Namespace) -> int:
    """Return how many streams every configuration divides the data into."""
    return LOADERS * args.gpus


def ours(args: argparse.Namespace, entry: Entry, folder: Path, data: Path, out: Path) -> None:
    """Train with run.py and add what its metrics.jsonl says."""
    profiled = args.bubble and entry.pp > 1
    iters = args.iters + profiled
    options = {
        "-g": args.gpus,
        "--tp": entry.tp,
        "--pp": entry.pp,
        "--tokenizer-load-dir": folder / entry.shape,
        "--data-path": data,
        "--save-dir": out,
        "--train-iters": iters,
        "--seq-length": args.seq_length,
        "--micro-batch-size": entry.micro_batch_size,
        "--global-batch-size": entry.global_batch_size,
        "--num-workers": LOADERS,
        "--lr": args.lr,
        "--lr-decay-style": "constant",
    }
    flags = ["--dist-optim", f"model.freeze_vision_model={not args.train_vision}"]
    flags += ["--megatron-load-dir", str(folder / f"{entry.shape}-megatron")] if args.weights else ["--init"]
    flags += ["--fp8", "--fp8-recipe", entry.what] if entry.what != "none" else []
    flags += ["--profile", f"{iters}:{iters}", "logging.profile_ranks=0"] if profiled else []
    held = ("optimizer.lr_warmup_fraction=0", f"data.num_streams={streams(args)}")  # all layouts read one order
    command = training_command(options, *flags, *held, *args.more)
    lines = run_command(command, entry, out / "run" / "metrics.jsonl")[: args.iters]
    if entry.error:
        return
    if profiled:
        trace = read_trace.read(next((out / "run" / "profile").glob("*.trace.json.gz")))
        entry.bubbles.append(read_trace.bubble(trace))
    entry.losses = [round(line["loss"], 4) for line in lines]
    for line in lines[args.warm_up :]:
        seconds = line["step_seconds"]
        entry.steps.append(
            {
                "seconds": seconds,
                "tokens": line["num_tokens"],
                "samples": line["num_conversations"],
                "tflops": line["tflops_per_device"],
                "mfu": line["mfu"] or 0.0,
                "waited": line["data_wait_seconds"] / seconds,
                "fill": line["fill"],
                "memory": line["memory_gib"] or 0.0,
            }
        )


def peer(args: argparse.Namespace, entry: Entry, folder: Path, data: Path, out: Path) -> None:
    """Train with the Hugging Face stack and add what it measured; FLOPs are counted as for us."""
    out.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.gpus}"]
    command += ["-m", "benchmarks.hf_peer", "--hf", str(folder / entry.shape), "--data", str(data)]
    command += ["--out", str(out / "steps.jsonl"), "--iters", str(args.iters), "--seq-length", str(args.seq_length)]
    command += ["--micro-batch-size", str(entry.micro_batch_size), "--global-batch-size", str(entry.global_batch_size)]
    command += ["--lr", str(args.lr)]
    command += ["--padded", "--recompute"] if entry.what == "hf-padded" else []
    command += ["--train-vision"] if args.train_vision else []
    lines = run_command(command, entry, out / "steps.jsonl", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    if entry.error:
        return
    entry.losses = [round(line["loss"], 3) for line in lines]
    hf = load_hf_config(folder / entry.shape)
    trained, peak = TrainedParts(vision_model=args.train_vision), peak_flops(torch.cuda.get_device_name())
    for line in lines[args.warm_up :]:
        names = ("num_tokens", "num_pairs", "num_tiles", "num_trained")
        work = Workload(*(int(line[name]) for name in names))
        flops, seconds = model_flops(hf, work, trained).total, line["step_seconds"]
        entry.steps.append(
            {
                "seconds": seconds,
                "tokens": line["num_tokens"],
                "samples": line["num_conversations"],
                "tflops": flops / seconds / args.gpus / 1e12,
                "mfu": 0.0 if peak is None else mfu(flops, seconds, args.gpus, peak),
                "memory": line["memory_gib"],
            }
        )


def run_command(
    command: Sequence[str], entry: Entry, result: Path, env: Mapping[str, str] = MappingProxyType({})
) -> list[dict[str, float]]:
    """Run it, with `env` added to the environment, and return the lines of its result; the entry keeps an error."""
    done = subprocess.run(command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, check=False)
    if done.returncode:
        entry.error = (done.stdout + done.stderr)[-3000:]
        return []
    return read_lines(result)


def row_of(args: argparse.Namespace, entry: Entry, entries: Sequence[Entry]) -> dict[str, Any]:
    """Return the medians of an entry, and its speed as a multiple of our first one's and of each peer's."""
    gpus = args.gpus
    row: dict[str, Any] = {"shape": entry.shape, "what": PEERS.get(entry.what, entry.what)}
    row |= {"tp": entry.tp, "pp": entry.pp, "dp": gpus // (entry.tp * entry.pp)}
    row |= {"mbs": entry.micro_batch_size, "gbs": entry.global_batch_size}
    if not entry.steps:
        return row | {"error": entry.error}

    def median(name: str, scale: float = 1.0, digits: int = 1) -> float:
        return round(scale * statistics.median(step[name] for step in entry.steps), digits)

    row |= {
        "tok/s/GPU": round(speed(entry, "tokens") / gpus),
        "samples/s": round(speed(entry, "samples"), 1),
        "TF/s/GPU": median("tflops"),
        "MFU %": median("mfu", 100),
        "s/step": median("seconds", digits=3),
        "GiB": median("memory"),
    }
    if not entry.is_peer:
        row |= {"wait %": median("waited", 100), "fill": median("fill", digits=4)}
        first = next(other for other in entries if other.shape == entry.shape and other.losses)
        if first is not entry:
            row |= {"÷ first": round(speed(entry, "tokens") / speed(first, "tokens"), 3)}
            row |= {"loss off %": loss_off(entry, first)} if args.weights else {}
    if entry.bubbles:
        micro_batches = entry.global_batch_size * entry.tp * entry.pp // (entry.micro_batch_size * gpus)
        row |= {"bubble %": round(100 * statistics.median(entry.bubbles), 1)}
        row |= {"predicted %": round(100 * read_trace.predicted_bubble(entry.pp, micro_batches), 1)}
    for other in entries:
        if other.is_peer and other.steps and other.shape == entry.shape and not entry.is_peer:
            unit = "samples" if other.what == "hf-padded" else "tokens"
            row[f"÷ {other.what}"] = round(speed(entry, unit) / speed(other, unit), 3)
    return row | {"loss": entry.losses, "steps": len(entry.steps)}


def loss_off(entry: Entry, first: Entry) -> float:
    """Return the largest difference of a step's loss from the first entry's, per cent of it."""
    return round(max(100 * abs(a / b - 1) for a, b in zip(entry.losses, first.losses, strict=True)), 2)


def speed(entry: Entry, unit: str) -> float:
    """Return tokens or samples per second of all GPUs, the median of the steps."""
    return statistics.median(step[unit] / step["seconds"] for step in entry.steps)


if __name__ == "__main__":
    main()
