"""NeMo Automodel: the YAML file of its recipe for vision-language models, with the settings that its documents
recommend for speed: neat packing, FlashAttention, FSDP2 with gathered weights kept, Liger, Transformer Engine's loss.

Its guide to mixed precision has two patterns with fp32 master weights. On several GPUs: fp32 weights in FSDP2's shards
with torch's AdamW. On one GPU it does not apply FSDP2, which would cast them: there bf16 weights with Transformer
Engine's FusedAdam, which keeps the other 16 bits of each.
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
    "bounds of packed conversations go to the decoder alone (as published to the tower too, which then stops)",
    "no checkpoint at the end",
)
LOSSES = "nemo_automodel.components.loss"
NEVER = 10**6
"""Steps between checkpoints and validations."""


def command(args: argparse.Namespace, entry: Entry, kind: str, folder: Path, out: Path, recompute: bool) -> list[str]:
    """Write the YAML file; return module and arguments of a rank."""
    has_gpu = torch.cuda.is_available()
    config = {
        "recipe": "FinetuneRecipeForVLM",
        "seed": 42,
        "dist_env": {"backend": "nccl" if has_gpu else "gloo", "timeout_minutes": 10},
        "checkpoint": {"enabled": False, "checkpoint_dir": str(out / "product")},
        **_model(args, folder, has_gpu),
        **_data(args, folder, has_gpu),
        **_steps(args, entry),
        "optimizer": _optimizer(args, has_gpu),
        "distributed": _distributed(recompute),
    }
    file = out / "automodel.yaml"
    file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return ["benchmarks.peers.automodel_rank", "-c", str(file)]


def _model(args: argparse.Namespace, folder: Path, has_gpu: bool) -> dict[str, Any]:
    """Model, loss and what is trained."""
    loss = "te_parallel_ce.TEParallelCrossEntropy" if has_gpu else "masked_ce.MaskedCrossEntropy"
    config: dict[str, Any] = {
        "model": {
            "_target_": "nemo_automodel.NeMoAutoModelForImageTextToText.from_pretrained",
            "pretrained_model_name_or_path": str(folder / "hf"),
            "torch_dtype": "bfloat16" if _fused_adam(args, has_gpu) else "float32",
            "attn_implementation": "flash_attention_2" if has_gpu else "sdpa",
            "use_liger_kernel": has_gpu,
        },
        "loss_fn": {"_target_": f"{LOSSES}.{loss}"},
        "clip_grad_norm": {"max_norm": 1.0},
        "freeze_config": {
            "freeze_vision_tower": not args.train_vision,
            "freeze_language_model": False,
            "unfreeze_modules": [{"glob": "*visual.merger*"}],
        },
    }
    return config


def _data(args: argparse.Namespace, folder: Path, has_gpu: bool) -> dict[str, Any]:
    return {
        "processor": {
            "_target_": "transformers.AutoProcessor.from_pretrained",
            "pretrained_model_name_or_path": str(folder / "hf"),
        },
        "dataset": {
            "_target_": "nemo_automodel.components.datasets.vlm.datasets.make_meta_dataset",
            "path_or_dataset": str(folder / "automodel.json"),
        },
        "packed_sequence": {
            "pretokenize": True,
            "max_length": args.seq_length,
            "pack_size": args.seq_length,
            "packing_ratio": 1.0,
            "drop_long_samples": True,
        },
        "dataloader": {
            "_target_": "torchdata.stateful_dataloader.StatefulDataLoader",
            "num_workers": 8 if has_gpu else 1,
            "persistent_workers": True,
            "prefetch_factor": 4,
            "pin_memory": has_gpu,
        },
    }


def _steps(args: argparse.Namespace, entry: Entry) -> dict[str, Any]:
    return {
        "step_scheduler": {
            "global_batch_size": entry.global_batch_size,
            "local_batch_size": entry.micro_batch_size,
            "max_steps": args.iters + 1,
            "num_epochs": args.iters + 1,
            "ckpt_every_steps": NEVER,
            "val_every_steps": NEVER,
            "save_checkpoint_every_epoch": False,
            "gc_every_steps": 10,
        },
    }


def _fused_adam(args: argparse.Namespace, has_gpu: bool) -> bool:
    """Return whether nothing casts fp32 weights; on the CPU, which has no such optimizer, everything is in fp32."""
    return has_gpu and args.gpus == 1


def _optimizer(args: argparse.Namespace, has_gpu: bool) -> dict[str, Any]:
    """Return the optimizer of one of the guide's two patterns, with moments as ours where it can have them."""
    settings: dict[str, Any] = {"lr": args.lr, "weight_decay": 0.0, "betas": [0.9, 0.95]}
    if not _fused_adam(args, has_gpu):
        return {"_target_": "torch.optim.AdamW", **settings, "fused": True}
    moments = "torch.bfloat16" if "optimizer.exp_avg_dtype=bf16" in args.more else "torch.float32"
    return {
        "_target_": "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
        **settings,
        "adam_w_mode": True,
        "bias_correction": True,
        "master_weights": True,
        "store_param_remainders": True,
        "exp_avg_dtype": moments,
        "exp_avg_sq_dtype": moments,
    }


def _distributed(recompute: bool) -> dict[str, Any]:
    """FSDP2. Without recomputation, gathered weights and sums of gradients stay until the end of a step."""
    return {
        "strategy": "fsdp2",
        "dp_size": "none",
        "tp_size": 1,
        "cp_size": 1,
        "sequence_parallel": False,
        "activation_checkpointing": recompute,
        "reshard_after_forward": recompute,
        "defer_fsdp_grad_sync": not recompute,
        "enable_fsdp2_prefetch": True,
        "mp_policy": {
            "_target_": "torch.distributed.fsdp.MixedPrecisionPolicy",
            "param_dtype": "bfloat16",
            "reduce_dtype": "float32",
            "output_dtype": "bfloat16",
            "cast_forward_inputs": True,
        },
    }
