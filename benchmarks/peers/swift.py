"""Megatron-SWIFT: the command line of `megatron sft` with the settings that its documents recommend for speed."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch

from benchmarks.train_step_rows import Entry

KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
UNUSED = ("modelscope", "oss2", "openai", "fastapi", "uvicorn", "rouge", "nltk", "jieba", "attrdict")
"""Imported and not used in these runs."""
CHANGED = (
    "the interface of flash-attn 2 over torch's own kernels, where flash-attn is missing",
    "Transformer Engine's product in place of apex's for fused accumulation of gradients",
    "FlashAttention-2 in the tower beside cuDNN's in the decoder (as published: sdpa, window by window)",
    "no checkpoint at the end",
    "stand-ins for packages that are imported and not used",
)


def command(args: argparse.Namespace, entry: Entry, kind: str, folder: Path, out: Path, recompute: bool) -> list[str]:
    """Return module and flags of a rank. `folder`: of `prepare.make_peer_folder` and `make_lists`."""
    flags: dict[str, object] = {
        "model": folder / "hf",
        "model_type": kind,
        "template": "qwen2_5_vl" if kind == "qwen2_5_vl" else "qwen3_vl",
        "use_hf": True,
        "check_model": False,
        "torch_dtype": "bfloat16",
        "output_dir": out / "product",
        "ddp_backend": "nccl" if torch.cuda.is_available() else "gloo",
        "add_version": False,
        "report_to": "tensorboard",
        "logging_steps": 1,
        "eval_iters": 0,
        "save_steps": 10**6,
        "no_save_optim": True,
        "no_save_rng": True,
    }
    flags |= _data(args, folder) | _training(args, entry) | _speed(recompute)
    if kind == "qwen3_vl_moe":
        flags |= _experts(args)
    return ["benchmarks.peers.swift_rank", *_words(flags)]


def _data(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    return {
        "dataset": folder / "swift.jsonl",
        "split_dataset_ratio": 0,
        "load_from_cache_file": False,
        "dataset_num_proc": min(16, os.cpu_count() or 1),
        "dataset_shuffle": False,
        "packing": True,
        "padding_free": True,
        "max_length": args.seq_length,
        "truncation_strategy": "delete",
        "dataloader_num_workers": 8,
        "dataloader_prefetch_factor": 4,
    }


def _training(args: argparse.Namespace, entry: Entry) -> dict[str, object]:
    moments = "bf16" if "optimizer.exp_avg_dtype=bf16" in args.more else "fp32"  # as ours
    flags: dict[str, object] = {
        "micro_batch_size": entry.micro_batch_size,
        "global_batch_size": entry.global_batch_size,
        "train_iters": args.iters,
        "lr": args.lr,
        "lr_decay_style": "constant",
        "weight_decay": 0,
        "clip_grad": 1.0,
        "tensor_model_parallel_size": entry.tp,
        "pipeline_model_parallel_size": entry.pp,
        "sequence_parallel": entry.tp > 1,
        "use_distributed_optimizer": True,
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": moments,
        "exp_avg_sq_dtype": moments,
    }
    if args.lora_r:
        flags |= {"tuner_type": "lora", "lora_rank": args.lora_r, "lora_alpha": 2 * args.lora_r, "lora_dropout": 0}
        return flags | {"target_modules": "all-linear", "freeze_vit": True, "freeze_aligner": True}
    flags |= {"tuner_type": "full", "freeze_llm": False, "freeze_aligner": False}
    return flags | {"freeze_vit": not args.train_vision}


def _speed(recompute: bool) -> dict[str, object]:
    """The fastest of what the documents offer."""
    flags: dict[str, object] = {
        "attention_backend": "fused",
        "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": "te",
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "manual_gc": True,
        "manual_gc_steps": 1000,
        "vit_gradient_checkpointing": recompute,
        "recompute_granularity": "full" if recompute else "none",
    }
    return flags | ({"recompute_method": "uniform", "recompute_num_layers": 1} if recompute else {})


def _experts(args: argparse.Namespace) -> dict[str, object]:
    flags: dict[str, object] = {
        "expert_model_parallel_size": args.ep,
        "moe_grouped_gemm": True,
        "moe_permute_fusion": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_aux_loss_coeff": 0,
    }
    if "router.force_balance=true" in args.more:  # as ours
        flags["megatron_extra_kwargs"] = json.dumps({"moe_router_force_load_balancing": True})
    return flags


def _words(flags: dict[str, object]) -> list[str]:
    words = []
    for name, value in flags.items():
        words += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return words
