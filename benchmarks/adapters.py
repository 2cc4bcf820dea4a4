"""Adapters on one GPU: ours through `run.py` and Hugging Face with PEFT, on the same weights and shards.

    python -m benchmarks.adapters --shape llava-1.5-7b --kinds lora nf4 --peer --rounds 2 --json out.json
    python -m benchmarks.adapters --shape llava-1.5-7b --kinds lora fp8 full --iters 8
    python -m benchmarks.adapters --shape llava-1.5-13b --kinds lora nf4

Prints tokens/s (wall time with data wait, real tokens), peak memory, both as multiples of the peer's, and the seconds
outside of steps ("start s"). Kinds: lora, dora, nf4 (QLoRA) and fp8w (FP8 matrices under LoRA), fp8 (FP8 products of
a bf16 model), fp8only (the same without the bf16 matrices), full (everything trained but the tower). Configurations
take turns; medians over the steps of all rounds. The peer: `benchmarks/peft_peer.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.material import make_shards, make_weights
from benchmarks.record import RESERVED, ROOT, show, write_record
from benchmarks.runs import parse_with_overrides, run_command, training_command
from benchmarks.shapes import SHAPES, make_hf_folder
from benchmarks.train_step_peer import ENVIRONMENT

KINDS: dict[str, tuple[str, ...]] = {
    "lora": (),
    "dora": ("--lora-dora",),
    "nf4": ("--lora-quantize", "nf4"),
    "fp8w": ("--lora-quantize", "fp8"),
    "fp8": ("--fp8",),
    "fp8only": ("--fp8", "--fp8-recipe", "tensorwise", "--lora-quantize", "fp8"),
    "full": (),
}
WITH_PEER = ("lora", "dora", "nf4")
PEER_IN_BF16 = {"fp8": "lora", "fp8w": "lora", "fp8only": "lora"}
"""Kinds that PEFT does not have, and the kind of PEFT's beside which they are put."""
LOADERS = 4


@dataclass
class Entry:
    """One configuration and the duration of its steps.

    `start`: seconds of the last round outside of steps: imports, loading, quantizing, ending. `stack`: the components
    of a peer.
    """

    kind: str
    is_peer: bool
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    memory: float = 0.0
    start: float = 0.0
    losses: list[float] = field(default_factory=list)
    stack: str = ""
    error: str = ""

    @property
    def speed(self) -> float:
        """Median tokens per second."""
        return statistics.median(n / s for n, s in zip(self.tokens, self.seconds, strict=True))


def main() -> None:
    """Measure every configuration in turns and print the table."""
    args = parse()
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        folder = Path(work)
        data = make_shards(folder / "data", num_samples=args.samples, sizes=SHAPES[args.shape].sizes)
        make_hf_folder(folder / "hf", args.shape, seq_length=args.seq_length, num_layers=args.layers)
        make_weights(folder / "hf")
        convert = [sys.executable, "-m", "llava_mcore", "import-hf", "--hf-dir", folder / "hf"]
        subprocess.run([*convert, "--megatron-dir", folder / "megatron"], cwd=ROOT, check=True)
        peers = [Entry(kind, is_peer=True) for kind in args.kinds if args.peer and kind in WITH_PEER]
        entries = [Entry(kind, is_peer=False) for kind in args.kinds] + peers
        for number in range(args.rounds):
            for i, entry in enumerate(entries):
                if not entry.error:
                    measure(args, entry, folder, data, folder / f"{i}-{number}")
                    print(json.dumps(row_of(args, entry, entries)), flush=True)
                    write(args, entries)
    show([row_of(args, entry, entries) for entry in entries], leave_out=("losses", "error", "stack"))
    for entry in entries:
        print(*(f"{entry.kind}: {text}" for text in (entry.stack, entry.error) if text), sep="\n")


def write(args: argparse.Namespace, entries: list[Entry]) -> None:
    """Write what has been measured so far, so that a run that is killed leaves its first rows."""
    if args.json is not None:
        rows = [row_of(args, entry, entries) for entry in entries if entry.seconds or entry.error]
        write_record(args.json, rows, gpus=1, memory=RESERVED)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llava-1.5-7b")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["lora"])
    parser.add_argument("--peer", action="store_true", help="also Hugging Face with PEFT, where it has the kind")
    parser.add_argument("--lora-r", type=int, default=64)
    parser.add_argument("--recompute", action="store_true", help="decoder layers, ours and the peer's")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--micro-batch-size", type=int, default=1, help="packs of one forward pass")
    parser.add_argument("--global-batch-size", type=int, default=8, help="packs of one step")
    parser.add_argument("--layers", type=int, help="shorten the decoder")
    parser.add_argument("--iters", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=3, help="first iterations that do not count")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--work", type=Path, help="folder for weights and data (default: the temporary one)")
    parser.add_argument("--json", type=Path)
    return parse_with_overrides(parser)


def measure(args: argparse.Namespace, entry: Entry, folder: Path, data: Path, out: Path) -> None:
    """Run one configuration and add what it measured."""
    out.mkdir()
    began = time.monotonic()
    if entry.is_peer:
        result = out / "steps.jsonl"
        lines, entry.error = run_command(peer_command(args, entry.kind, folder, data, result), result, ENVIRONMENT)
    else:
        lines, entry.error = run_command(our_command(args, entry.kind, folder, data, out), out / "run/metrics.jsonl")
    if entry.error:
        return
    entry.stack = str(lines[0].get("stack", "")) if entry.is_peer else ""
    entry.start = time.monotonic() - began - sum(line["step_seconds"] for line in lines)
    entry.losses = [round(line["loss"], 4) for line in lines]
    for line in lines[args.warm_up :]:
        entry.seconds.append(line["step_seconds"])
        entry.tokens.append(line["num_tokens"])
        entry.memory = max(entry.memory, line["memory_gib"] or 0.0)


def our_command(args: argparse.Namespace, kind: str, folder: Path, data: Path, out: Path) -> list[str]:
    """Return the command of one of our runs."""
    options = {
        "-g": 1,
        "--megatron-load-dir": folder / "megatron",
        "--tokenizer-load-dir": folder / "hf",
        "--data-path": data,
        "--save-dir": out,
        "--train-iters": args.iters,
        "--seq-length": args.seq_length,
        "--micro-batch-size": args.micro_batch_size,
        "--global-batch-size": args.global_batch_size,
        "--num-workers": LOADERS,
        "--lr": args.lr,
        "--lr-decay-style": "constant",
    }
    lora = [] if kind == "full" else ["--lora-r", str(args.lora_r), "--lora-alpha", str(2 * args.lora_r)]
    recompute = ["--recompute", "full"] if args.recompute else []
    held = ("optimizer.lr_warmup_fraction=0", f"data.num_streams={LOADERS}")
    return training_command(options, *lora, *KINDS[kind], *recompute, *held, *args.more)


def peer_command(args: argparse.Namespace, kind: str, folder: Path, data: Path, result: Path) -> list[str]:
    """Return the command of a peer."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command += ["-m", "benchmarks.peft_peer", "--hf", str(folder / "hf"), "--data", str(data), "--out", str(result)]
    for name in ("lora_r", "seq_length", "micro_batch_size", "global_batch_size", "iters", "lr"):
        command += [f"--{name.replace('_', '-')}", str(vars(args)[name])]
    flags = {"lora": [], "dora": ["--dora"], "nf4": ["--nf4"]}[kind]
    return command + flags + (["--recompute"] if args.recompute else [])


def row_of(args: argparse.Namespace, entry: Entry, entries: list[Entry]) -> dict[str, Any]:
    """Return what is shown of one configuration."""
    row: dict[str, Any] = {"shape": args.shape, "stack": entry.stack, "error": entry.error}
    row |= {"what": f"{'PEFT' if entry.is_peer else 'ours'} {entry.kind}", "losses": entry.losses}
    if not entry.seconds:
        return row
    row |= {"tok/s": round(entry.speed), "peak GiB": round(entry.memory, 2), "start s": round(entry.start)}
    kind = PEER_IN_BF16.get(entry.kind, entry.kind)
    peer = next((x for x in entries if x.is_peer and x.kind == kind and x.seconds), None)
    if peer is not None and not entry.is_peer:
        row["÷ PEFT"] = round(entry.speed / peer.speed, 3)
        if peer.memory:
            row["memory ÷ PEFT"] = round(entry.memory / peer.memory, 3)
    return row


if __name__ == "__main__":
    main()
