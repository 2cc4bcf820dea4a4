"""A rank of VeOmni's trainer for vision-language models, measured: reads a YAML file, see `veomni.py`."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.peers import cpu_look, stubs
from benchmarks.peers.meter import Meter
from benchmarks.peers.versions import versions

UNUSED = ("av", "librosa", "soundfile")
PACKAGES = ("veomni", "torch", "transformers", "liger-kernel", "torchdata", "flash-attn", "datasets")


def main() -> None:
    """Train as VeOmni's tasks/train_vlm.py does."""
    if not torch.cuda.is_available():
        cpu_look.without_cuda()
    from veomni.arguments import parse_args
    from veomni.trainer import vlm_trainer  # imports of transformers, which asks what is installed

    stubs.install(*UNUSED)
    stack: dict[str, Any] = {"stand-ins": stubs.INSTALLED, "versions": versions(PACKAGES)}
    args = parse_args(vlm_trainer.VeOmniVLMArguments)
    vlm_trainer.MAX_PIXELS = args.data.mm_configs["image_max_pixels"]
    if not torch.cuda.is_available():
        cpu_look.at_veomni()
    trainer = vlm_trainer.VLMTrainer(args)
    measure(trainer, Meter(stack), stack)
    trainer.train()


def measure(trainer: Any, meter: Meter, stack: dict[str, Any]) -> None:
    """Measure the trainer's steps, with what they wait for their data."""
    step, step_begin = trainer.train_step, trainer.on_step_begin
    args = trainer.base.args
    positions = args.train.micro_batch_size * args.data.max_seq_len

    def begin(micro_batches: Any = None) -> None:
        for batch in micro_batches:
            starts = batch["cu_seq_lens_q"].numel() - 1
            trained = (batch["labels"] != -100).sum()
            meter.count(batch["attention_mask"].sum(), trained, starts, positions)
        step_begin(micro_batches=micro_batches)

    def timed(iterator: Any) -> None:
        if "parameters" not in stack:
            stack.update(_described(trainer.base))
            meter.begin()
        step(iterator)
        meter.end(float(trainer.base.step_train_metrics["training/total_loss"]))

    trainer.train_step, trainer.on_step_begin = timed, begin


def _described(base: Any) -> dict[str, Any]:
    """Return what is trained and how."""
    first = next(base.model.parameters())
    return {
        "parameters": sum(p.numel() for p in base.model.parameters()),
        "trained": sum(p.numel() for p in base.model.parameters() if p.requires_grad),
        "weights": f"{first.dtype} in {type(first).__name__}",
        "attention": base.model.config._attn_implementation,
        "class": f"{type(base.model).__module__}.{type(base.model).__qualname__}",
        "gradient_checkpointing": base.args.train.gradient_checkpointing.enable,
    }


if __name__ == "__main__":
    main()
