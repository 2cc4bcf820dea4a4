"""The command line of `train_step.py`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

import torch

from benchmarks.material import VIDEO_SIZES, pair_tokens
from benchmarks.peer_model import Reshard
from benchmarks.peers.run import refused
from benchmarks.runs import RECIPES, parse_with_overrides
from benchmarks.shapes import OF_VIDEOS, SHAPES
from benchmarks.train_step_rows import PEERS, PRODUCTS

GRAPHS = {
    "off": (),
    "on": ("model.cuda_graphs=true",),
    "vision": ("model.cuda_graphs=true", "model.cuda_graphs_vision=true"),
}
"""What --cuda-graphs takes."""
WITH_TOWER = "+vision"
"""After a recipe: --fp8-vision."""
LOADERS = 4
"""Loader processes per GPU. The rank that loads data for tp x pp ranks has those of all of them."""


def make_parser(description: str = "") -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["llava-1b"])
    parser.add_argument(
        "--layouts", nargs="+", default=["1,1"], help="tp,pp or tp,pp,micro-batch size; data parallel over the rest"
    )
    parser.add_argument(
        "--fp8",
        nargs="+",
        default=["none"],
        choices=["none", *RECIPES, *(recipe + WITH_TOWER for recipe in RECIPES)],
        help=f"recipes; {WITH_TOWER}: in a trained tower too",
    )
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count() or 1, help="without one: CPU processes")
    parser.add_argument(
        "--cp", nargs="+", type=int, default=[1], help="ranks that divide samples; every layout of ours with each"
    )
    parser.add_argument("--ep", type=int, default=1, help="processes that divide the experts, in every layout of ours")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="packs of one forward pass")
    parser.add_argument("--global-batch-size", type=int, default=16, help="packs of one step")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--layers", type=int, help="shorten the decoder")
    parser.add_argument("--iters", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=4, help="first iterations that do not count")
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--images", type=int, default=1, help="of a sample, for long ones")
    parser.add_argument(
        "--videos",
        type=int,
        default=0,
        metavar="FRAMES",
        help="one of three conversations has a video of about so many frames, two per second, instead of its images",
    )
    parser.add_argument("--lr", type=float, default=1e-5, help="ours and the peers', from the first step to the last")
    parser.add_argument("--train-vision", action="store_true", help="also train the vision tower")
    parser.add_argument(
        "--lora-r", type=int, help="train adapters of the decoder, ours and the products'; implies --weights"
    )
    parser.add_argument(
        "--cuda-graphs", nargs="+", default=["off"], choices=GRAPHS, help="vision: of a trained tower too"
    )
    parser.add_argument(
        "--vision-data-parallel",
        action="store_true",
        help="run each layout with tp > 1 a second time, with whole towers whose ranks divide the images",
    )
    parser.add_argument(
        "--tp-comm-overlap",
        nargs="+",
        default=["off"],
        choices=["off", "on"],
        help="run each layout with tp > 1 with sequence parallelism, and its messages as these say",
    )
    parser.add_argument(
        "--fsdp",
        nargs="+",
        default=["none"],
        choices=["none", "optim", "optim_grads", "optim_grads_params"],
        help="run each layout with these; none: the distributed optimizer",
    )
    parser.add_argument(
        "--weights", action="store_true", help="all layouts begin with the same weights, imported first"
    )
    parser.add_argument("--bubble", action="store_true", help="profile one step more where pp > 1")
    parser.add_argument("--spread", action="store_true", help="profile one step more of ours on all ranks")
    parser.add_argument("--traces", type=Path, help="profile one step more of ours, and keep the trace in this folder")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--peer", nargs="+", choices=[*PEERS, *PRODUCTS], default=[], help="compare with them")
    parser.add_argument("--peer-packages", type=Path, help="folder of benchmarks.peers.install, for products")
    parser.add_argument("--peer-micro-batch-size", type=int, help="packs of a packed peer (default: as ours)")
    parser.add_argument(
        "--peer-reshard",
        choices=get_args(Reshard),
        default="backward",
        help="how long a peer keeps gathered weights: until the end of a forward pass, a backward pass, or a step",
    )
    parser.add_argument("--peer-compile", action="store_true", help="compile the peers' decoder layers")
    parser.add_argument("--padded-micro-batch-size", type=int, default=16, help="samples; recomputes decoder layers")
    parser.add_argument("--padded-micro-batches", type=int, default=4, help="of a step of the padded peer")
    parser.add_argument("--data", type=Path, help="keep the shards in this folder, for later runs")
    parser.add_argument("--work", type=Path, help="folder for the data (default: the system's temporary one)")
    parser.add_argument("--json", type=Path)
    return parser


def parse(description: str = "") -> argparse.Namespace:
    """Read the command line and refuse what cannot be measured."""
    parser = make_parser(description)
    args = parse_with_overrides(parser)
    args.weights = args.weights or bool(args.lora_r)  # an adapter belongs to a trained model
    if args.gpus < 1:
        parser.error("--gpus must be at least 1: GPUs, or CPU processes where there is no GPU")
    args.peer_micro_batch_size = args.peer_micro_batch_size or args.micro_batch_size
    problem = why_no_videos(args) or refused(args)
    if problem:
        parser.error(problem)
    if args.peer and args.global_batch_size % (args.peer_micro_batch_size * args.gpus):
        parser.error("--global-batch-size must be a multiple of --peer-micro-batch-size times --gpus")
    micro_batch_sizes = {size for _, _, size in sizes(args)}
    bad = [size for size in micro_batch_sizes if args.global_batch_size % (size * streams(args))]
    if args.weights and len(micro_batch_sizes) > 1 and bad:
        parser.error(
            "layouts with unequal micro-batch sizes read the same samples in a step only if --global-batch-size is a "
            f"multiple of each times the {streams(args)} streams of the data, which it is not for {bad}"
        )
    return args


def why_no_videos(args: argparse.Namespace) -> str:
    """Return why --videos is refused, or nothing."""
    if args.videos == 0:
        return ""
    if args.videos < 2:
        return f"--videos {args.videos}: give at least 2 frames, which Qwen's towers merge, or 0 for no videos"
    for shape in args.shape:
        if SHAPES[shape].kind not in OF_VIDEOS:
            known = ", ".join(name for name, x in SHAPES.items() if x.kind in OF_VIDEOS)
            return f"--videos: {shape} takes no videos here; shapes that do: {known}"
    if args.peer:
        return f"--videos is for ours alone: leave out --peer {' '.join(args.peer)}, whose data has images only"
    least = 2 * max(pair_tokens(*size) for size in VIDEO_SIZES)
    if args.seq_length < least:
        return f"--videos needs --seq-length {least} or more, half of it for two frames; it is {args.seq_length}"
    return ""


def sizes(args: argparse.Namespace) -> list[tuple[int, int, int]]:
    """Return tp, pp and micro-batch size of every layout."""
    layouts = [tuple(int(x) for x in layout.split(",")) for layout in args.layouts]
    return [(tp, pp, more[0] if more else args.micro_batch_size) for tp, pp, *more in layouts]


def streams(args: argparse.Namespace) -> int:
    """Return how many streams every configuration divides the data into."""
    return LOADERS * args.gpus
