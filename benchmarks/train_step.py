"""Training speed of published LLaVA shapes: `run.py` itself on real shards, any layout, BF16 and FP8.

    python -m benchmarks.train_step --shape llava-1.5-7b --layouts 1,1 2,1 --fp8 none delayed --json out.json
    python -m benchmarks.train_step --shape llava-1.5-7b --micro-batch-size 2 --global-batch-size 24 \\
        --fp8 none delayed --peer hf hf-fp8 hf-padded --rounds 2

Prints tokens/s, TFLOP/s and MFU for each GPU (wall time with data wait, real tokens, dense BF16 peak), memory, fill and
"÷ first", tokens/s as a multiple of the first configuration's. With --weights all layouts load the same weights (random
ones differ by layout), and "loss off %" is how far the losses of the steps are at most from the first configuration's,
which reads the same samples. With --cuda-graphs off on every configuration also runs without graphs, and "loss off %"
is how far its losses are from those of the same one without. With --bubble one more step of each pipelined layout is
profiled: "bubble %" is what the first stage waited for the others, "predicted %" what it should be
(`benchmarks/read_trace.py`), of the time of all passes. With --spread one more step of every layout is profiled on all
ranks: "slowest ÷ mean" compares for how long their GPUs compute, without messages. With --traces one more step of every
layout is profiled, and its trace copied to a folder. With --peer also Hugging Face stacks (`benchmarks/hf_peer.py`) on
the same shards, their components, and the ratios to them; one that runs out of memory is run again in a form that needs
less. Configurations take turns, as many rounds as asked for; medians over the steps of all rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch

from benchmarks import read_trace
from benchmarks.material import make_audio_shards, make_shards, make_weights
from benchmarks.peer_model import Reshard
from benchmarks.peers.run import chosen, product, refused
from benchmarks.record import RESERVED, ROOT, show, write_record
from benchmarks.runs import RECIPES, run_command, training_command
from benchmarks.shapes import SHAPES, Size, make_hf_folder
from benchmarks.train_step_peer import peer
from benchmarks.train_step_rows import PEERS, PRODUCTS, Entry, row_of

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


def main() -> None:
    """Measure every configuration in turns and print the table."""
    args = parse()
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        folder = Path(work)
        entries, data = [], {}
        for shape in args.shape:
            sizes = SHAPES[shape].sizes
            if sizes not in data:
                of_images = f"-{args.images}-images" if args.images > 1 else ""
                data[sizes] = (args.data or folder) / f"{shape}-{args.samples}{of_images}"
                if not data[sizes].exists():
                    make_data(data[sizes], sizes, args.samples, args.images)
            make_hf_folder(folder / shape, shape, seq_length=args.seq_length, num_layers=args.layers)
            entries += planned(args, shape)
            if args.weights:
                make_weights(folder / shape)
                convert = [sys.executable, "-m", "llava_mcore", "import-hf", "--hf-dir", folder / shape]
                subprocess.run([*convert, "--megatron-dir", folder / f"{shape}-megatron"], cwd=ROOT, check=True)
        for number in range(args.rounds):
            for place, entry in enumerate(entries):
                if not entry.error:
                    run = product if entry.what in PRODUCTS else peer if entry.is_peer else ours
                    shards = data[SHAPES[entry.shape].sizes]
                    run(args, entry, folder, shards, folder / f"{place}-{number}")
                    print(json.dumps(row_of(args, entry, entries)), flush=True)
                    write(args, entries)
    show([row_of(args, entry, entries) for entry in entries], leave_out=("loss", "error", "stack"))
    for entry in entries:
        if entry.stack:
            print(f"{entry.shape} {entry.what}: {entry.stack}")
        if entry.error:
            print(f"{entry.shape} {entry.what} tp {entry.tp} pp {entry.pp}:\n{entry.error}")


def make_data(where: Path, sizes: Sequence[Size], num_samples: int, num_images: int) -> None:
    """Make shards that appear under their name when they are complete. `sizes`: of images; none for audio clips."""
    parts = where.with_name(where.name + ".partial")
    shutil.rmtree(parts, ignore_errors=True)
    if sizes:
        make_shards(parts, num_samples=num_samples, sizes=sizes, num_images=num_images)
    else:
        make_audio_shards(parts, num_samples=num_samples)
    parts.rename(where)


def write(args: argparse.Namespace, entries: Sequence[Entry]) -> None:
    """Write what has been measured so far, so that a run that is killed leaves its first rows."""
    if args.json is not None:
        rows = [row_of(args, entry, entries) for entry in entries if entry.steps or entry.error]
        write_record(args.json, rows, gpus=args.gpus, memory=RESERVED)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count() or 1, help="without any: CPU processes")
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
    parser.add_argument("--lr", type=float, default=1e-5, help="ours and the peers', from the first step to the last")
    parser.add_argument("--train-vision", action="store_true", help="also train the vision tower")
    parser.add_argument("--lora-r", type=int, help="train adapters of the decoder, ours and the products'")
    parser.add_argument(
        "--cuda-graphs", nargs="+", default=["off"], choices=GRAPHS, help="vision: of a trained tower too"
    )
    parser.add_argument(
        "--vision-data-parallel",
        action="store_true",
        help="run each layout with tp > 1 a second time, with whole towers whose ranks divide the images",
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
    parser.add_argument("--peer-packages", type=Path, help="folder of benchmarks.peers.install, for swift and lmms")
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
    parser.add_argument("more", nargs="*", help="key=value overrides of our run's configuration")
    return parser


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser()
    args = parser.parse_intermixed_args()  # overrides may stand between or after the options
    args.peer_micro_batch_size = args.peer_micro_batch_size or args.micro_batch_size
    problem = refused(args)
    if problem:
        parser.error(problem)
    if args.peer and args.global_batch_size % (args.peer_micro_batch_size * max(1, args.gpus)):
        parser.error("--global-batch-size must be a multiple of --peer-micro-batch-size times --gpus")
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
    entries = [
        Entry(shape, fp8, *size, args.global_batch_size, whole_towers=whole, graphs=graphs, cp=cp, fsdp=fsdp)
        for size in sizes(args)
        for cp in args.cp
        for fp8 in args.fp8
        for graphs in args.cuda_graphs
        for fsdp in args.fsdp
        for whole in ((False, True) if args.vision_data_parallel and size[0] > 1 else (False,))
    ]
    padded = (args.padded_micro_batch_size, args.padded_micro_batch_size * args.padded_micro_batches * args.gpus)
    packed = (args.peer_micro_batch_size, args.global_batch_size)
    peers = [
        Entry(shape, name, 1, 1, *(padded if name == "hf-padded" else packed)) for name in args.peer if name in PEERS
    ]
    return entries + peers + chosen(args, shape, sizes(args))


def streams(args: argparse.Namespace) -> int:
    """Return how many streams every configuration divides the data into."""
    return LOADERS * args.gpus


def ours(args: argparse.Namespace, entry: Entry, folder: Path, data: Path, out: Path) -> None:
    """Train with run.py and add what its metrics.jsonl says."""
    profiled = args.traces is not None or args.spread or (args.bubble and entry.pp > 1)
    iters = args.iters + profiled
    options = {
        "-g": args.gpus,
        "--tp": entry.tp,
        "--pp": entry.pp,
        "--cp": entry.cp,
        "--ep": args.ep,
        "--tokenizer-load-dir": folder / entry.shape,
        "--data-path": data,
        "--save-dir": out,
        "--train-iters": iters,
        "--seq-length": args.seq_length,
        "--micro-batch-size": entry.micro_batch_size,
        "--global-batch-size": entry.global_batch_size,
        "--num-workers": LOADERS * entry.tp * entry.cp * entry.pp,
        "--lr": args.lr,
        "--lr-decay-style": "constant",
    }
    flags = ["--dist-optim", f"model.freeze_vision_model={not args.train_vision}"]
    flags += ["--megatron-load-dir", str(folder / f"{entry.shape}-megatron")] if args.weights else ["--init"]
    flags += ["--lora-r", str(args.lora_r), "--lora-alpha", str(2 * args.lora_r)] if args.lora_r else []
    flags += ["--vision-data-parallel", "on" if entry.whole_towers else "off"] if entry.tp > 1 else []
    flags += ["--fsdp", entry.fsdp] if entry.fsdp != "none" else []
    flags += ["--sequence-parallel"] if entry.tp > 1 and "num_experts" in SHAPES[entry.shape].text else []
    if entry.what != "none":
        flags += ["--fp8", "--fp8-recipe", entry.what.removesuffix(WITH_TOWER)]
        flags += ["--fp8-vision"] if entry.what.endswith(WITH_TOWER) else []
    if profiled:
        flags += ["--profile", f"{iters}:{iters}", *([] if args.spread else ["logging.profile_ranks=0"])]
    held = ["optimizer.lr_warmup_fraction=0", f"data.num_streams={streams(args)}"]  # all layouts read one order
    held += [f"data.sample_multiple={2 * math.lcm(*args.cp)}"] if max(args.cp) > 1 else []  # and the same packs
    command = training_command(options, *flags, *held, *GRAPHS[entry.graphs], *args.more)
    lines, entry.error = run_command(command, out / "run" / "metrics.jsonl")
    lines = lines[: args.iters]
    if entry.error:
        return
    if profiled:
        files = sorted((out / "run" / "profile").glob("*.trace.json.gz"))  # of rank 0 first
        if args.spread:
            entry.spreads.append(read_trace.spread([read_trace.read(file) for file in files]))
        if args.traces is not None:
            args.traces.mkdir(parents=True, exist_ok=True)
            shutil.copy(files[0], args.traces / f"{entry.shape}.{entry.what}.tp{entry.tp}.pp{entry.pp}.trace.json.gz")
        if args.bubble and entry.pp > 1:
            entry.bubbles.append(read_trace.bubble(read_trace.read(files[0])))
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


if __name__ == "__main__":
    main()
