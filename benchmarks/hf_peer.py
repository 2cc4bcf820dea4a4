"""The Hugging Face stack that llava_mcore is compared with: one rank of it; `train_step.py --peer` starts it.

LlavaForConditionalGeneration with PyTorch's FSDP2 (bf16 compute, fp32 weights and AdamW, fused), Liger's kernels with
its fused linear cross-entropy, and cuDNN's attention. It reads the same shards through the same loader.

Packed: sequences of seq_length tokens, as many a micro-batch as asked for. Its attention is plainly causal, so samples
of a pack see each other: keeping them apart would need a mask, which costs speed. Padded: one sample per row, padded
to the longest of the micro-batch, with an attention mask, as people run it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from liger_kernel.transformers import apply_liger_kernel_to_llava
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlavaConfig, LlavaForConditionalGeneration

from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encoding.assets import load_assets
from llava_mcore.data.loading.loader import TrainLoader
from llava_mcore.data.samples import Batch
from llava_mcore.pixels import normalize

IGNORED = -100
ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def main() -> None:
    """Train for some steps and let rank 0 write what each of them took."""
    args = parse()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    config = LlavaConfig.from_pretrained(args.hf, attn_implementation="sdpa")
    model = build(config, device, train_vision=args.train_vision, recompute=args.recompute)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=args.lr, weight_decay=0.0, fused=True
    )
    data = DataConfig(path=args.data, seq_length=args.seq_length, num_workers=4, packing=not args.padded)
    data = data.model_copy(update={"shuffle_buffer_size": 0})
    loader = TrainLoader(
        data,
        load_assets(args.hf),
        micro_batch_size=args.micro_batch_size if args.padded else 1,
        dp_rank=rank,
        dp_size=world,
        seed=1234,
    )
    num_micro = args.global_batch_size // (args.micro_batch_size * world)
    steps = []
    for _ in range(args.iters):
        dist.barrier()
        torch.cuda.synchronize()
        start, counts, total = time.perf_counter(), torch.zeros(5, dtype=torch.int64), torch.zeros((), device=device)
        for _ in range(num_micro):
            batches = [next(loader) for _ in range(1 if args.padded else args.micro_batch_size)]
            counts += torch.tensor([sum(column) for column in zip(*map(counted, batches), strict=True)])
            inputs = to_hugging_face(batches, None if args.padded else args.seq_length, device)
            with sdpa_kernel(ATTENTION, set_priority=True):
                loss = model(**inputs, use_cache=False).loss / num_micro
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        dist.all_reduce(total, dist.ReduceOp.AVG)
        steps.append((seconds, counts, float(total)))
    write(args.out, steps, device)
    loader.close()
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", type=Path, required=True, help="Hugging Face folder of the shape")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="file for the steps, a JSON object per line")
    parser.add_argument("--padded", action="store_true")
    parser.add_argument("--recompute", action="store_true", help="of all decoder layers")
    parser.add_argument("--train-vision", action="store_true")
    parser.add_argument("--seq-length", type=int, required=True)
    parser.add_argument("--micro-batch-size", type=int, required=True)
    parser.add_argument("--global-batch-size", type=int, required=True)
    parser.add_argument("--iters", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    return parser.parse_args()


def build(
    config: LlavaConfig, device: torch.device, *, train_vision: bool, recompute: bool
) -> LlavaForConditionalGeneration:
    """Return the sharded model with random weights."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(config)
    model.model.vision_tower.requires_grad_(train_vision)
    apply_liger_kernel_to_llava(fused_linear_cross_entropy=True, model=model)
    if recompute:
        model.gradient_checkpointing_enable()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.language_model.layers:
        fully_shard(layer, mp_policy=policy)
    # The tower goes with the root: sharded by itself, transformers no longer collects its hidden states.
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = parameter.to_local()
            local.fill_(1.0) if local.ndim == 1 and "norm" in name else local.normal_(0, 0.02)
    restore_buffers(model, device)
    return model.train()


def restore_buffers(model: nn.Module, device: torch.device) -> None:
    """Buffers made on the meta device have no values."""
    text = model.config.text_config
    head = text.hidden_size // text.num_attention_heads
    theta = text.rope_parameters["rope_theta"]
    for name, buffer in model.named_buffers():
        if "position_ids" in name:
            buffer.copy_(torch.arange(buffer.numel(), device=device).view(buffer.shape))
        elif "inv_freq" in name:
            buffer.copy_(theta ** (-torch.arange(0, head, 2, device=device, dtype=torch.float32) / head))
        else:
            raise ValueError(f"the buffer {name} has no value here")


def counted(batch: Batch) -> tuple[int, int, int, int, int]:
    """Return tokens, pairs of tokens in causal attention, pictures, conversations and trained tokens."""
    num_trained = int(batch.loss_mask.sum())
    return batch.num_tokens, batch.num_pairs, len(batch.media["pixel_values"]), len(batch.sample_keys), num_trained


def to_hugging_face(batches: list[Batch], pad_to: int | None, device: torch.device) -> dict[str, Any]:
    """Return what Hugging Face's model takes, on the device. With pad_to, every batch is one row of a pack."""
    fields: dict[str, Any] = {}
    ids, labels = zip(*[(b.input_ids, unshifted(b.labels, b.loss_mask)) for b in batches], strict=True)
    for name, rows, fill in (("input_ids", ids, 3), ("labels", labels, IGNORED)):
        if pad_to is not None:
            rows = [nn.functional.pad(row, (0, pad_to - row.shape[1]), value=fill) for row in rows]
        fields[name] = torch.cat(list(rows)).pin_memory().to(device, non_blocking=True)
    if pad_to is None:
        fields["attention_mask"] = (batches[0].input_ids != 3).to(torch.int64).to(device)
    pixels = torch.cat([b.media["pixel_values"] for b in batches]).to(device, non_blocking=True)
    scale = batches[0].media["pixel_scale"].to(device)
    return fields | {"pixel_values": normalize(pixels, scale).to(torch.bfloat16)}


def unshifted(labels: Tensor, loss_mask: Tensor) -> Tensor:
    """Return labels [b, s] that name the token itself, not the one after it, as Hugging Face takes them."""
    found = torch.full_like(labels, IGNORED)
    found[:, 1:] = torch.where(loss_mask[:, :-1] > 0, labels[:, :-1], IGNORED)
    return found


def write(out: Path, steps: list[tuple[float, Tensor, float]], device: torch.device) -> None:
    """Add up what the ranks counted; rank 0 writes it."""
    counts = torch.stack([step[1] for step in steps]).to(device)
    dist.all_reduce(counts)
    memory = torch.tensor(torch.cuda.max_memory_allocated() / 2**30, device=device)
    dist.all_reduce(memory, dist.ReduceOp.MAX)
    if dist.get_rank() != 0:
        return
    with out.open("w", encoding="utf-8") as file:
        for (seconds, _, loss), row in zip(steps, counts.tolist(), strict=True):
            names = ("num_tokens", "num_pairs", "num_tiles", "num_conversations", "num_trained")
            numbers = dict(zip(names, row, strict=True))
            file.write(
                json.dumps({"step_seconds": seconds, "loss": loss, "memory_gib": float(memory), **numbers}) + "\n"
            )


if __name__ == "__main__":
    main()
