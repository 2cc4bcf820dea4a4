"""Hugging Face with PEFT, which `adapters.py` compares llava_mcore's adapters with: one process, one GPU.

transformers' class in bf16 with Liger's kernels and its fused linear cross-entropy, attention within the samples of a
pack, and PEFT's LoRA on the decoder's linear layers, in bf16 too, as PEFT's own casts to fp32 cost time. With --nf4 the
decoder is loaded in 4 bits by bitsandbytes. The same shards, loader and packs as ours.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, BitsAndBytesConfig

from benchmarks.hf_peer import LOADERS, counted, report, to_hugging_face, wait
from benchmarks.peer_attention import NAME, register
from benchmarks.peer_classes import CLASSES
from benchmarks.peer_model import Peer, Stack
from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encoding.assets import load_assets
from llava_mcore.data.loading.loader import TrainLoader

NOT_QUANTIZED = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]


def main() -> None:
    """Train for some steps and write what each took."""
    args = parse()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")  # torchrun's, of one process
    stack = Stack(recompute=args.recompute)
    peer = build(args, stack, device)
    steps = train(args, peer, device)
    dist.destroy_process_group()
    liger = "Liger's layers and loss" if stack.uses_liger(device) else "transformers' layers, loss in chunks"
    described = f"PEFT; {'NF4 by bitsandbytes' if args.nf4 else 'bf16'}; {liger}"
    described += "; decoder layers recomputed" if args.recompute else ""
    args.out.write_text("".join(json.dumps({"stack": described} | x) + "\n" for x in steps), encoding="utf-8")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", type=Path, required=True, help="Hugging Face folder with weights")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="file for the steps, a JSON object per line")
    parser.add_argument("--lora-r", type=int, required=True)
    parser.add_argument("--nf4", action="store_true")
    parser.add_argument("--dora", action="store_true")
    parser.add_argument("--recompute", action="store_true", help="decoder layers")
    parser.add_argument("--seq-length", type=int, required=True)
    parser.add_argument("--micro-batch-size", type=int, required=True, help="packs")
    parser.add_argument("--global-batch-size", type=int, required=True)
    parser.add_argument("--iters", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    return parser.parse_args()


def build(args: argparse.Namespace, stack: Stack, device: torch.device) -> Peer:
    """Return the model with adapters on every linear layer of the decoder; all else is frozen."""
    register()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=NOT_QUANTIZED,
    )
    model: Any = AutoModelForImageTextToText.from_pretrained(
        args.hf,
        dtype=dtype,
        attn_implementation="sdpa",
        device_map={"": device},
        quantization_config=quantization if args.nf4 else None,
    )
    model.requires_grad_(False)
    model.model.language_model.config._attn_implementation = NAME
    liger = stack.uses_liger(device)
    if liger:
        CLASSES[model.config.model_type].use_liger(model)
    if args.recompute:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    lora = LoraConfig(
        r=args.lora_r, lora_alpha=2 * args.lora_r, use_dora=args.dora, target_modules=r".*language_model.*\.\w+_proj"
    )
    inject_adapter_in_model(lora, model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return Peer(model, liger=liger).train()


def train(args: argparse.Namespace, peer: Peer, device: torch.device) -> list[dict[str, Any]]:
    """Return what each step took and what it trained on."""
    config = AutoConfig.from_pretrained(args.hf)
    trained = [p for p in peer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr, weight_decay=0.0, fused=True)
    num_micro = args.global_batch_size // args.micro_batch_size
    workers = LOADERS if device.type == "cuda" else 0
    data = DataConfig(
        path=args.data, seq_length=args.seq_length, num_workers=workers, packing=True, shuffle_buffer_size=0
    )
    assets = CLASSES[config.model_type].assets(load_assets(args.hf))
    options: dict[str, Any] = {"dp_rank": 0, "dp_size": 1, "seed": 1234, "num_micro_batches": num_micro}
    loader = TrainLoader(data, assets, micro_batch_size=args.micro_batch_size, **options)
    steps = []
    for _ in range(args.iters):
        wait(device)
        start, counts, total = time.perf_counter(), Counter[str](), torch.zeros((), device=device)
        for _ in range(num_micro):
            batch = next(loader)
            counts.update(counted(batch))
            inputs = to_hugging_face(config, batch, device)
            loss = peer(inputs) / (len(inputs.rows) * num_micro)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wait(device)
        steps.append(report(time.perf_counter() - start, counts, total, device))
    loader.close()
    return steps


if __name__ == "__main__":
    main()
