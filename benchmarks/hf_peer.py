"""The Hugging Face stack that llava_mcore is compared with: one rank of it; `train_step.py --peer` starts it.

transformers' class with PyTorch's FSDP2 (bf16 compute, fp32 weights and AdamW, fused), Liger's kernels with its fused
linear cross-entropy, and attention within the samples of a pack (`benchmarks/peer_model.py`). It reads the same shards
through the same loader, in the same packs, and the output layer only reads the tokens that are trained.

Padded: one sample per row, padded to the longest of the micro-batch, with an attention mask, as people run it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from benchmarks.peer_attention import Packs
from benchmarks.peer_classes import CLASSES, to_device
from benchmarks.peer_model import Inputs, Peer, Reshard, Stack, after_update, build, keep_gathered
from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.data.loader.train_loader import TrainLoader
from llava_mcore.data.samples import Batch
from llava_mcore.media.batch_fields import PIXEL_VALUES, Field
from llava_mcore.parallel.batch import longest, pad_to
from llava_mcore.training.fetch import count

LOADERS = 4
"""Loader processes of a rank, as of our own runs; on a CPU none."""
PAD = 3
"""Token id, in every folder of `benchmarks.shapes`."""


def main() -> None:
    """Train for some steps and let rank 0 write what each of them took."""
    args = parse()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    stack = Stack(args.reshard, args.recompute, args.fp8, args.compile, not args.padded, args.train_vision)
    try:
        steps = train(args, stack, device)
    finally:
        dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        lines = [{"stack": stack.describe(device)} | step for step in steps]
        args.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    parser.add_argument("--padded", action="store_true")
    parser.add_argument("--reshard", choices=get_args(Reshard), default="backward", help="free gathered weights")
    parser.add_argument("--fp8", action="store_true", help="float8 in the decoder layers; needs torchao")
    parser.add_argument("--compile", action="store_true", help="decoder layers; with --fp8 they always are")
    parser.add_argument("--train-vision", action="store_true")
    return parser.parse_args()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every peer."""
    parser.add_argument("--hf", type=Path, required=True, help="Hugging Face folder of the shape")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="file for the steps, a JSON object per line")
    parser.add_argument("--recompute", action="store_true", help="decoder layers")
    parser.add_argument("--seq-length", type=int, required=True)
    parser.add_argument("--micro-batch-size", type=int, required=True, help="packs; samples where they are padded")
    parser.add_argument("--global-batch-size", type=int, required=True)
    parser.add_argument("--iters", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)


def train(args: argparse.Namespace, stack: Stack, device: torch.device) -> list[dict[str, Any]]:
    """Return what each step took and what it trained on, over all ranks."""
    config = AutoConfig.from_pretrained(args.hf)
    return run_steps(args, build(config, stack, device), stack, device)


def run_steps(args: argparse.Namespace, peer: Peer, stack: Stack, device: torch.device) -> list[dict[str, Any]]:
    """Train a peer; return what each step took and what it trained on, over all ranks."""
    config = AutoConfig.from_pretrained(args.hf)
    trained = [p for p in peer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr, weight_decay=0.0, fused=True)
    num_micro = args.global_batch_size // (args.micro_batch_size * dist.get_world_size())
    loader = open_loader(args, config, stack, device, num_micro)
    whole = args.micro_batch_size * args.seq_length if stack.packed and stack.compiles else None
    steps = []
    for _ in range(args.iters):
        wait(device)
        start, counts, total = time.perf_counter(), Counter[str](), torch.zeros((), device=device)
        for number in range(num_micro):
            batch = next(loader)
            counts.update(counted(batch))
            keep_gathered(peer, stack, is_last=number == num_micro - 1)
            inputs = to_hugging_face(config, batch, device, pad_length=whole)
            loss = peer(inputs) / (len(inputs.rows) * num_micro)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        after_update(peer, stack)
        optimizer.zero_grad(set_to_none=True)
        wait(device)
        steps.append(report(time.perf_counter() - start, counts, total, device))
    loader.close()
    return steps


def open_loader(
    args: argparse.Namespace, config: PretrainedConfig, stack: Stack, device: torch.device, num_micro: int
) -> TrainLoader:
    """Open this rank's loader, as of our own runs. `num_micro`: micro-batches of a step."""
    data = DataConfig(
        path=args.data,
        seq_length=args.seq_length,
        num_workers=LOADERS if device.type == "cuda" else 0,
        packing=stack.packed,
        shuffle_buffer_size=0,
    )
    return TrainLoader(
        data,
        CLASSES[config.model_type].assets(load_assets(args.hf)),
        micro_batch_size=args.micro_batch_size,
        dp_rank=dist.get_rank(),
        dp_size=dist.get_world_size(),
        seed=1234,
        num_micro_batches=num_micro,
    )


def wait(device: torch.device) -> None:
    """Wait for all ranks and for the device's work."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()


def counted(batch: Batch) -> dict[str, int]:
    """Return what a micro-batch holds, counted as our own runs are, and its trained tokens."""
    return asdict(count([batch])) | {"num_trained": int(batch.loss_mask.count_nonzero())}


def to_hugging_face(
    config: PretrainedConfig, batch: Batch, device: torch.device, *, pad_length: int | None = None
) -> Inputs:
    """Return what the peer takes, on its device. Packs are padded to `pad_length` tokens, if given."""
    kind, has_pictures = CLASSES[config.model_type], len(batch.media[PIXEL_VALUES]) > 0
    pictures = kind.inputs(config, batch, device) if has_pictures else kind.blank(config, device)
    row = batch if pad_length is None else pad_to(batch, pad_length, dict.fromkeys(batch.media, Field(())))
    rows = row.loss_mask.flatten().nonzero().squeeze(1)
    targets = row.labels.flatten()[rows]
    text: dict[str, Any] = {"input_ids": to_device(row.input_ids, device)}
    if row.cu_seqlens.numel():
        text["position_ids"] = to_device(row.position_ids, device)
        text["packs"] = Packs(to_device(row.cu_seqlens, device), longest(row.cu_seqlens))
    else:
        text["attention_mask"] = to_device((row.input_ids != PAD).to(torch.int64), device)
    return Inputs(text, pictures, to_device(rows, device), to_device(targets, device), has_pictures=has_pictures)


def report(seconds: float, counts: Counter[str], loss: torch.Tensor, device: torch.device) -> dict[str, Any]:
    """Add up what the ranks counted; the loss is their mean, memory is that of the rank with the most."""
    sums = torch.tensor(list(counts.values()), device=device)
    memory = torch.tensor(torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else 0.0, device=device)
    dist.all_reduce(sums)
    dist.all_reduce(loss)
    dist.all_reduce(memory, dist.ReduceOp.MAX)
    numbers = dict(zip(counts, sums.tolist(), strict=True))
    return {
        "step_seconds": seconds,
        "loss": float(loss) / dist.get_world_size(),
        "memory_gib": float(memory),
        **numbers,
    }


if __name__ == "__main__":
    main()
