"""Training speed of published LLaVA shapes: `run.py` itself on real shards, any layout, BF16 and FP8.

    python -m benchmarks.train_step --shape llava-1.5-7b --layouts 1,1 2,1 --fp8 none delayed --json out.json
    python -m benchmarks.train_step --shape llava-1.5-7b --micro-batch-size 2 --global-batch-size 24 \\
        --fp8 none delayed --peer hf hf-fp8 hf-padded --rounds 2

Prints tokens/s, TFLOP/s and MFU for each GPU (wall time with data wait, real tokens, dense BF16 peak), memory, fill and
"÷ first", tokens/s as a multiple of the first configuration's. With --weights or --lora-r all layouts load the same
weights (random ones differ by layout), and "loss off %" is how far the losses of the steps are at most from the first
configuration's, which reads the same samples. With --cuda-graphs off on every configuration also runs without graphs,
and "loss off %" is how far its losses are from those of the same one without. With --videos one of three conversations
has a video instead of its image, which only ours can read. With --bubble one more step of each pipelined layout is
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
import sys
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError

from benchmarks import read_trace
from benchmarks.material import conversations, make_audio_shards, make_weights, with_videos, write_shards
from benchmarks.peers.run import chosen, product, products_folder
from benchmarks.record import RESERVED, show, write_record
from benchmarks.runs import DISK_FULL, disk_full, run_command, training_command
from benchmarks.shapes import SHAPES, Size, make_hf_folder
from benchmarks.train_step_options import GRAPHS, LOADERS, WITH_TOWER, parse, sizes, streams
from benchmarks.train_step_peer import peer
from benchmarks.train_step_rows import PEERS, PRODUCTS, Entry, row_of
from benchmarks.work_folder import work_folder


def main() -> None:
    """Measure every configuration in turns and print the table."""
    args = parse(__doc__ or "")
    with work_folder(args.work) as folder:
        entries = [entry for shape in args.shape for entry in planned(args, shape)]
        turns = [(number, place, entry) for number in range(args.rounds) for place, entry in enumerate(entries)]
        for turn, (number, place, entry) in enumerate(turns):
            if not entry.error:
                out = folder / f"{place}-{number}"
                measure(args, entry, folder, out)
                shutil.rmtree(out, ignore_errors=True)
                print(json.dumps(row_of(args, entry, entries)), flush=True)
                write(args, entries)
            remove_weights(folder, entry.shape, [later for _, _, later in turns[turn + 1 :] if not later.error])
    show([row_of(args, entry, entries) for entry in entries], leave_out=("loss", "error", "stack"))
    for entry in entries:
        if entry.stack:
            print(f"{entry.shape} {entry.what}: {entry.stack}")
        if entry.error:
            print(f"{entry.shape} {entry.what} tp {entry.tp} pp {entry.pp}:\n{entry.error}")


def measure(args: argparse.Namespace, entry: Entry, folder: Path, out: Path) -> None:
    """Run a configuration once, and first make what it needs; a full disk ends the row, not the others."""
    run = product if entry.what in PRODUCTS else peer if entry.is_peer else ours
    try:
        data = made_data(args, entry.shape, folder)
        if not (folder / entry.shape).exists():
            make_hf_folder(folder / entry.shape, entry.shape, seq_length=args.seq_length, num_layers=args.layers)
        if args.weights and not entry.is_peer:
            entry.error = import_weights(folder, entry.shape)
        if not entry.error:
            run(args, entry, folder, data, out)
    except (OSError, SafetensorError) as error:
        if DISK_FULL not in str(error):
            raise
        entry.error = disk_full(str(error))


def import_weights(folder: Path, shape: str) -> str:
    """Make random weights of a shape in our form, once for all its layouts; return what went wrong, or nothing."""
    where, parts = folder / f"{shape}-megatron", folder / f"{shape}-weights"
    if where.exists():
        return ""
    try:
        shutil.copytree(folder / shape, parts)
        make_weights(parts)
        convert = ["-m", "llava_mcore", "import-hf", "--hf-dir", str(parts), "--megatron-dir", str(where)]
        return run_command([sys.executable, *convert], where / "no lines")[1]
    finally:
        shutil.rmtree(parts, ignore_errors=True)


def remove_weights(folder: Path, shape: str, later: Sequence[Entry]) -> None:
    """Delete weights of a shape that no later run needs. `later`: the runs to come."""
    needing = [entry for entry in later if entry.shape == shape]
    if all(entry.is_peer for entry in needing):
        shutil.rmtree(folder / f"{shape}-megatron", ignore_errors=True)
    if not any(entry.what in PRODUCTS for entry in needing):
        shutil.rmtree(products_folder(folder, shape), ignore_errors=True)


def made_data(args: argparse.Namespace, shape: str, folder: Path) -> Path:
    """Return the shards of a shape's images, made unless there are some."""
    sizes = SHAPES[shape].sizes
    first = next(name for name in args.shape if SHAPES[name].sizes == sizes)  # shapes share them
    of_images = f"-{args.images}-images" if args.images > 1 else ""
    # Videos are cut to fit the packs, so data for other packs has another name.
    of_videos = f"-{args.videos}-frames-{args.seq_length}" if args.videos else ""
    data: Path = (args.data or folder) / f"{first}-{args.samples}{of_images}{of_videos}"
    if not data.exists():
        make_data(data, sizes, args.samples, args.images, num_frames=args.videos, seq_length=args.seq_length)
    return data


def make_data(
    where: Path,
    sizes: Sequence[Size],
    num_samples: int,
    num_images: int = 1,
    *,
    num_frames: int = 0,
    seq_length: int = 0,
) -> None:
    """Make shards that appear under their name when they are complete.

    Args:
        sizes: of images; none for audio clips.
        num_frames, seq_length: as for `with_videos`; 0: no videos.
    """
    parts = where.with_name(where.name + ".partial")
    shutil.rmtree(parts, ignore_errors=True)
    if sizes:
        samples = conversations(num_samples, sizes, num_images=num_images)
        write_shards(parts, with_videos(samples, num_frames, seq_length) if num_frames else samples)
    else:
        make_audio_shards(parts, num_samples=num_samples)
    parts.rename(where)


def write(args: argparse.Namespace, entries: Sequence[Entry]) -> None:
    """Write what has been measured so far, so that a run that is killed leaves its first rows."""
    if args.json is not None:
        rows = [row_of(args, entry, entries) for entry in entries if entry.steps or entry.error]
        write_record(args.json, rows, gpus=args.gpus, memory=RESERVED)


def planned(args: argparse.Namespace, shape: str) -> list[Entry]:
    """Return the configurations of a shape: ours, then the peers."""
    entries = [
        Entry(
            shape,
            fp8,
            *size,
            args.global_batch_size,
            whole_towers=whole,
            graphs=graphs,
            cp=cp,
            fsdp=fsdp,
            overlap=overlap,
        )
        for size in sizes(args)
        for cp in args.cp
        for fp8 in args.fp8
        for graphs in args.cuda_graphs
        for fsdp in args.fsdp
        for whole in ((False, True) if args.vision_data_parallel and size[0] > 1 else (False,))
        for overlap in (args.tp_comm_overlap if size[0] > 1 else ["off"])
    ]
    padded = (args.padded_micro_batch_size, args.padded_micro_batch_size * args.padded_micro_batches * args.gpus)
    packed = (args.peer_micro_batch_size, args.global_batch_size)
    peers = [
        Entry(shape, name, 1, 1, *(padded if name == "hf-padded" else packed)) for name in args.peer if name in PEERS
    ]
    return entries + peers + chosen(args, shape, sizes(args))


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
    divides_tokens = "num_experts" in SHAPES[entry.shape].text or args.tp_comm_overlap != ["off"]
    flags += ["--sequence-parallel"] if entry.tp > 1 and divides_tokens else []
    flags += ["--tp-comm-overlap"] if entry.overlap == "on" else []
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
