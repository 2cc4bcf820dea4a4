"""Runs of the products that `train_step.py` starts beside ours."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.peers import stubs
from benchmarks.peers.flash_interface import write_package
from benchmarks.peers.meter import OUT, STEPS
from benchmarks.peers.prepare import make_lists, make_peer_folder
from benchmarks.peers.products import PRODUCTS, Product, launch
from benchmarks.record import ROOT
from benchmarks.runs import run_command
from benchmarks.shapes import SHAPES
from benchmarks.train_step_rows import Entry
from llava_mcore.doctor.packages import installed_version

ENVIRONMENT = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "TRANSFORMERS_DISABLE_TORCH_CHECK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "4",
}


def refused(args: argparse.Namespace) -> str:
    """Return what cannot be compared in words, or nothing."""
    names = [name for name in args.peer if name in PRODUCTS]
    if args.lora_r and len(names) < len(args.peer):
        return "--lora-r compares with swift alone; benchmarks.adapters has the Hugging Face stack with PEFT"
    if names and args.peer_packages is None:
        return f"--peer {' '.join(names)} needs --peer-packages: make the folder by python -m benchmarks.peers.install"
    if names and args.images > 1:
        return "--images above 1 is for ours and Hugging Face: the products' lists have one image a conversation"
    for name in names:
        if not (args.peer_packages / name).is_dir():
            return f"{args.peer_packages} has no folder {name}: python -m benchmarks.peers.install makes it"
        for shape in args.shape:
            if SHAPES[shape].kind not in PRODUCTS[name].kinds:
                return f"--peer {name} has {', '.join(PRODUCTS[name].kinds)}, and {shape} is {SHAPES[shape].kind}"
        if args.lora_r and not PRODUCTS[name].adapters:
            return f"--peer {name} trains all weights: leave out --lora-r"
        if not (args.lora_r or args.train_vision or PRODUCTS[name].frozen_tower):
            return f"--peer {name} trains the tower too: add --train-vision"
    return ""


def chosen(args: argparse.Namespace, shape: str, sizes: Sequence[tuple[int, int, int]]) -> list[Entry]:
    """Return the configurations of the products: in every layout of ours, or in the only one they have."""
    batch, entries = args.global_batch_size, []
    for name in (x for x in args.peer if x in PRODUCTS):
        layouts = [(tp, pp) for tp, pp, _ in sizes] if PRODUCTS[name].layouts else [(1, 1)]
        entries += [Entry(shape, name, *layout, args.peer_micro_batch_size, batch) for layout in dict.fromkeys(layouts)]
    return entries


def products_folder(folder: Path, shape: str) -> Path:
    """Return the folder of the weights, images and lists of a shape that the products read."""
    return folder / f"{shape}-products"


def product(args: argparse.Namespace, entry: Entry, folder: Path, data: Path, out: Path) -> None:
    """Train with a product and add what it measured; one that does not fit runs again with recomputation.

    `data`: our shards, whose conversations are written once more in the forms that the products read.
    """
    peer = PRODUCTS[entry.what]
    prepared = products_folder(folder, entry.shape)
    if not prepared.exists():
        try:
            make_lists(prepared, entry.shape, args.samples)
            make_peer_folder(prepared / "hf", entry.shape, seq_length=args.seq_length, layers=args.layers)
        except BaseException:
            shutil.rmtree(prepared, ignore_errors=True)
            raise
    for recompute in (False, True):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        command = [*launch(args.gpus), *peer.command(args, entry, SHAPES[entry.shape].kind, prepared, out, recompute)]
        steps = out / "steps.jsonl"
        lines, entry.error = run_command(
            command, steps, environment(args.peer_packages / entry.what, peer, out, args.iters)
        )
        if "out of memory" not in entry.error:
            break
    if entry.error:
        return
    entry.stack = f"{peer.title}; changed: {'; '.join(peer.changed)}; {lines[0]['stack']}"
    entry.losses = [round(line["loss"], 3) for line in lines]
    for line in lines[args.warm_up :]:
        step = {"seconds": line["step_seconds"], "tokens": line["num_tokens"], "samples": line["num_conversations"]}
        entry.steps.append(step | {"memory": line["memory_gib"], "fill": line["fill"]})


def environment(packages: Path, peer: Product, out: Path, iters: int) -> dict[str, str]:
    """Return the environment of a product: its own packages first, stand-ins last."""
    folders = [packages, ROOT, *os.environ.get("PYTHONPATH", "").split(os.pathsep), out / "stand-ins"]
    unused = [*peer.unused, *(() if torch.cuda.is_available() else ("transformer_engine", "transformer_engine_torch"))]
    stubs.write_start(out / "stand-ins")
    # FlashAttention 4's modules are in `flash_attn` too.
    if installed_version("flash-attn") is None and not (packages / "flash_attn").exists():
        write_package(out / "stand-ins")
    return ENVIRONMENT | {
        "PYTHONPATH": os.pathsep.join(str(x) for x in folders if str(x)),
        stubs.FOR_CHILDREN: ",".join(unused),
        "HF_HOME": str(out / "hf"),
        OUT: str(out / "steps.jsonl"),
        STEPS: str(iters),
    }
