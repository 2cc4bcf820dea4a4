"""VeOmni: the YAML file of its trainer for vision-language models, with the settings of its documents for packing.

On one GPU it does not wrap the model for FSDP2, without which it has no mixed precision: its documents name `ddp` and
`init_device: cuda` then, and weights and moments are in bf16.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.train_step_rows import Entry

KINDS = ("qwen2_5_vl",)
CHANGED = (
    "the interface of flash-attn 2 over torch's own kernels, where flash-attn is missing",
    "images in their size (as published: at most 602,112 pixels)",
    "no checkpoint at the end",
    "stand-ins for packages that are imported and not used",
    "not changed: on one GPU it has no fp32 weights (bf16 weights and moments; fp32 in the shards of several)",
)
MAX_PIXELS = 1600 * 1600
TEMPLATES = {"qwen2_5_vl": "qwen2_5vl", "qwen3_vl": "qwen3vl", "qwen3_vl_moe": "qwen3vl"}


def command(args: argparse.Namespace, entry: Entry, kind: str, folder: Path, out: Path, recompute: bool) -> list[str]:
    """Write the YAML file; return module and arguments of a rank."""
    has_gpu = torch.cuda.is_available()
    config = {
        "model": _model(folder, has_gpu),
        "data": _data(args, kind, folder, has_gpu),
        "train": _training(args, entry, out, recompute),
    }
    file = out / "veomni.yaml"
    file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return ["benchmarks.peers.veomni_rank", str(file)]


def _model(folder: Path, has_gpu: bool) -> dict[str, Any]:
    """Return the model, with the default kernels: FlashAttention, and Liger's with the loss inside the last product."""
    kernels: dict[str, str] = {"attn_implementation": "flash_attention_2"}
    if not has_gpu:
        names = ("cross_entropy_loss", "rms_norm", "swiglu_mlp", "rotary_pos_emb", "load_balancing_loss", "moe")
        kernels = {f"{name}_implementation": "eager" for name in names} | {"attn_implementation": "sdpa"}
    return {"model_path": str(folder / "hf"), "ops_implementation": kernels}


def _data(args: argparse.Namespace, kind: str, folder: Path, has_gpu: bool) -> dict[str, Any]:
    return {
        "train_path": str(folder / "veomni.jsonl"),
        "train_size": args.iters * args.global_batch_size * args.seq_length,
        "data_type": "conversation",
        "datasets_type": "mapping",
        "chat_template": TEMPLATES[kind],
        "max_seq_len": args.seq_length,
        "mm_configs": {"image_max_pixels": MAX_PIXELS},
        "dataloader": {"num_workers": 8 if has_gpu else 1, "prefetch_factor": 4, "pin_memory": has_gpu},
    }


def _training(args: argparse.Namespace, entry: Entry, out: Path, recompute: bool) -> dict[str, Any]:
    sharded = args.gpus > 1
    return {
        "accelerator": {
            "fsdp_config": {
                "fsdp_mode": "fsdp2" if sharded else "ddp",
                "reshard_after_forward": recompute,
                "reshard_after_backward": recompute,
                "mixed_precision": {"enable": sharded},
            }
        },
        "gradient_checkpointing": {"enable": recompute, "enable_reentrant": False},
        "freeze_vit": not args.train_vision,
        "vit_lr": args.lr,
        "optimizer": {"type": "adamw", "lr": args.lr, "lr_decay_style": "constant", "weight_decay": 0.0},
        "dyn_bsz": True,
        "micro_batch_size": entry.micro_batch_size,
        "global_batch_size": entry.global_batch_size,
        "num_train_epochs": 1,
        "max_steps": args.iters + 1,
        "init_device": "meta" if sharded else "cuda",
        "checkpoint": {"output_dir": str(out / "product"), "save_epochs": 0, "save_hf_weights": False},
    }
