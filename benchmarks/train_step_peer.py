"""Runs of the Hugging Face peers (`hf_peer.py`) that `train_step.py` starts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_args

import torch
from transformers import AutoConfig

from benchmarks.peer_model import Reshard
from benchmarks.runs import run_command
from benchmarks.train_step_rows import Entry
from llava_mcore.models.flops import TrainedParts, Workload, mfu, model_flops, peak_flops
from llava_mcore.training.fetch import StepCounts

ENVIRONMENT = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    # Each comparison of features with placeholders would wait for the GPU; our loader has counted them.
    "TRANSFORMERS_DISABLE_TORCH_CHECK": "1",
}


def peer(args: argparse.Namespace, entry: Entry, folder: Path, data: Path, out: Path) -> None:
    """Train with a Hugging Face stack and add what it measured; FLOPs are counted as for us.

    Where a stack does not fit into memory, the next one that needs less takes its turn; `entry.stack` says which ran.
    """
    out.mkdir()
    for number, flags in enumerate(stacks(args, entry)):
        result = out / f"steps-{number}.jsonl"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.gpus}"]
        command += ["-m", "benchmarks.hf_peer", "--hf", str(folder / entry.shape), "--data", str(data)]
        command += ["--out", str(result), "--iters", str(args.iters), "--seq-length", str(args.seq_length)]
        command += ["--micro-batch-size", str(entry.micro_batch_size)]
        command += ["--global-batch-size", str(entry.global_batch_size), "--lr", str(args.lr), *flags]
        lines, entry.error = run_command(command, result, ENVIRONMENT)
        if "out of memory" not in entry.error:
            break
    if entry.error:
        return
    entry.stack = str(lines[0]["stack"])
    entry.losses = [round(line["loss"], 3) for line in lines]
    hf = AutoConfig.from_pretrained(folder / entry.shape)
    trained = TrainedParts(vision_model=args.train_vision)
    peak = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    for line in lines[args.warm_up :]:
        counts = StepCounts(**{field.name: int(line[field.name]) for field in fields(StepCounts)})
        work = Workload(counts.num_tokens, counts.num_pairs, counts.media, int(line["num_trained"]))
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


def stacks(args: argparse.Namespace, entry: Entry) -> Iterator[list[str]]:
    """Yield the flags of stacks, the fastest first, each needing less memory than the one before it."""
    kind = {"hf": [], "hf-fp8": ["--fp8"], "hf-padded": ["--padded", "--recompute"]}[entry.what]
    kind += ["--train-vision"] if args.train_vision else []
    kind += ["--compile"] if args.peer_compile else []
    choices = list(get_args(Reshard))  # "forward" needs the least
    for reshard in reversed(choices[: choices.index(args.peer_reshard) + 1]):
        yield [*kind, "--reshard", reshard]
    if "--recompute" not in kind:
        yield [*kind, "--reshard", "forward", "--recompute"]
