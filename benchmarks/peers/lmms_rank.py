"""A rank of lmms-engine's FSDP2 trainer, measured: reads a YAML file of its own form, see `lmms.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.peers import cpu_look, stubs
from benchmarks.peers.meter import Meter
from benchmarks.peers.versions import versions

UNUSED = (
    *(
        "hydra",
        "omegaconf",
        "librosa",
        "soundfile",
        "decord",
        "qwen_omni_utils",
        "jsonlines",
        "diffusers",
        "av",
        "wandb",
    ),
    *("deepspeed", "bitsandbytes", "cv2"),
)
PACKAGES = ("lmms-engine", "torch", "transformers", "liger-kernel", "datasets", "flash-attn", "accelerate")


def main() -> None:
    """Train as `lmms_engine.launch.cli` does, or look at the data."""
    # transformers' lazy modules must be there before the stand-ins: it asks which packages are installed.
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration, Trainer  # noqa: F401

    stubs.install(*UNUSED)
    stack: dict[str, Any] = {"stand-ins": stubs.INSTALLED, "versions": versions(PACKAGES)}
    from lmms_engine.launch import cli
    from lmms_engine.train.fsdp2.fsdp2_trainer import FSDP2SFTTrainer
    from lmms_engine.utils.logging_utils import setup_distributed_logging

    setup_distributed_logging()
    config = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
    measure(FSDP2SFTTrainer, Meter(stack), stack, config["dataset_config"]["packing_length"])
    task = cli.create_train_task(config)
    task.build()
    if torch.cuda.is_available():
        task.run()
    else:
        look(task)


def measure(trainer: Any, meter: Meter, stack: dict[str, Any], seq_length: int) -> None:
    """Let the trainer keep fp32 weights, and measure its steps."""
    prepare_model, training_step = trainer.prepare_model, trainer.training_step
    started: list[bool] = []

    def prepared(self: Any) -> None:
        from lmms_engine.models.qwen2_5_vl import monkey_patch, qwen2_5_vl_ops

        if not hasattr(monkey_patch, "LigerRMSNorm") or not hasattr(qwen2_5_vl_ops, "flash_attn_varlen_func"):
            raise RuntimeError("lmms-engine has not found Liger or flash-attn, without which it does not pack")
        self.model.float()
        prepare_model(self)
        model = self.fsdp2_model
        stack["parameters"] = sum(p.numel() for p in model.parameters())
        stack["all trained"] = all(p.requires_grad for p in model.parameters())
        stack["attention"] = model.config._attn_implementation
        stack["gradient_checkpointing"] = self.args.gradient_checkpointing

    def timed(self: Any, batch: dict[str, Any]) -> Any:
        if not started:
            started.append(True)
            meter.begin()
        mask = batch["attention_mask"]
        positions = self.args.train_batch_size * seq_length
        meter.count(mask.sum(), (batch["labels"] != -100).sum(), mask.shape[0], positions)
        metrics = training_step(self, batch)
        if self.accumulated_grad_steps == 0:
            meter.end(float(metrics["train/loss"]))
        return metrics

    trainer.prepare_model, trainer.training_step = prepared, timed


def look(task: Any) -> None:
    """Show the first packs."""
    collate, rows = task.train_dataset.get_collator(), iter(task.train_dataset)
    for _ in range(2):
        pack = next(rows)
        batch = collate([pack])
        cpu_look.show(batch)
        print("conversations", len(pack), "tokens", int(batch["attention_mask"].sum()), flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
