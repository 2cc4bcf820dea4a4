"""lmms-engine: the YAML file of its FSDP2 trainer with the settings that its documents recommend for speed."""

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
    "weights in fp32 in the shards, as in the others (as published with bf16: bf16 weights and moments)",
    "no checkpoint at the end",
    "stand-ins for packages that are imported and not used",
)
LAYERS = {"qwen2_5_vl": ["Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock"]}


def command(args: argparse.Namespace, entry: Entry, kind: str, folder: Path, out: Path, recompute: bool) -> list[str]:
    """Write the YAML file; return module and arguments of a rank."""
    config = {
        "trainer_type": "fsdp2_trainer",
        "dataset_config": _data(args, kind, folder),
        "model_config": {
            "load_from_pretrained_path": str(folder / "hf"),
            "attn_implementation": "flash_attention_2",
        },
        "trainer_args": _training(args, entry, kind, out, recompute),
    }
    file = out / "lmms.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return ["benchmarks.peers.lmms_rank", str(file)]


def _data(args: argparse.Namespace, kind: str, folder: Path) -> dict[str, Any]:
    return {
        "dataset_type": "vision_iterable",
        "dataset_format": "yaml",
        "datasets": [{"path": str(folder / "lmms.jsonl"), "data_folder": "", "data_type": "jsonl"}],
        "processor_config": {
            "processor_name": str(folder / "hf"),
            "processor_type": kind,
            "extra_kwargs": {"image_max_pixels": 1600 * 1600, "image_min_pixels": 56 * 56},
        },
        "shuffle": False,
        "packing": True,
        "packing_strategy": "best_fit",  # "first_fit" has one open pack, of which 24 % stayed empty
        "packing_length": args.seq_length,
        "extra_kwargs": {"packing_kwargs": {"num_open_buckets": 32, "fill_threshold": 0.98}},
        "filter_overlong": True,
    }


def _training(args: argparse.Namespace, entry: Entry, kind: str, out: Path, recompute: bool) -> dict[str, Any]:
    has_gpu = torch.cuda.is_available()
    return {
        "output_dir": str(out / "product"),
        "per_device_train_batch_size": entry.micro_batch_size,
        "gradient_accumulation_steps": entry.global_batch_size // args.gpus // entry.micro_batch_size,
        "learning_rate": args.lr,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "max_steps": args.iters,
        "num_train_epochs": 1,
        "lr_scheduler_type": "constant",
        "lr_scheduler_kwargs": {"start_factor": 1.0},  # without a warm-up it would stay at 0.01
        "warmup_steps": 0,
        "warmup_ratio": 0.0,
        "use_cpu": not has_gpu,
        "bf16": has_gpu,
        "tf32": has_gpu,
        "gradient_checkpointing": recompute,
        "use_liger_kernel": True,
        "use_rmpad": True,
        "fsdp2": True,
        "fsdp_config": {"transformer_layer_cls_to_wrap": LAYERS[kind], "reshard_after_forward": recompute},
        "dataloader_num_workers": 8,
        "dataloader_prefetch_factor": 4,
        "dataloader_pin_memory": has_gpu,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "sp_ulysses_degree": 1,
    }
