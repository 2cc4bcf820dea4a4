"""A rank of Megatron-SWIFT's `megatron sft`, measured: flags as its own, see `swift.py`, which says what is changed.

On a machine without a GPU it stops after the first packs, which shows that flags and data are as they should be.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch

from benchmarks.peers import cpu_look, fused_gradients, stubs
from benchmarks.peers.meter import Meter
from benchmarks.peers.tokens import PAD_ID
from benchmarks.peers.versions import versions

PACKAGES = ("ms-swift", "mcore-bridge", "megatron-core", "transformer-engine", "torch", "transformers", "flash-attn")


def main() -> None:
    """Train as `megatron sft` does, or look at the data."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    stack: dict[str, Any] = {"stand-ins": stubs.INSTALLED}
    fused_gradients.install()
    if not torch.cuda.is_available():
        cpu_look.without_cuda()
    stack |= {"versions": versions(PACKAGES)}
    from mcore_bridge.model.mm_gpts.utils import HuggingFaceVit
    from swift.megatron import megatron_sft_main
    from swift.megatron.trainers import base

    HuggingFaceVit.prepare_attn_impl = _flash_tower
    if not torch.cuda.is_available():
        cpu_look.at_swift(base)
    meter = Meter(stack)
    prepare, step = base.prepare_batch, base.BaseMegatronTrainer.run_train_step

    def counted(args: Any, data: dict[str, Any], vp_stage: int | None = None) -> Any:
        mpu = base.mpu  # megatron.core.parallel_state
        if mpu.is_pipeline_last_stage() and mpu.get_tensor_model_parallel_rank() == 0:
            ids, trained = data["input_ids"], (data["labels"] != -100).sum()
            real = ids != PAD_ID
            positions = data.get("text_position_ids", data["position_ids"]).reshape(-1, *ids.shape)[0]
            meter.count(real.sum(), trained, int(((positions == 0) & real).sum()), ids.numel())
        return prepare(args, data, vp_stage=vp_stage)

    def timed(self: Any, *iterators: Any) -> Any:
        if not stack.get("trained"):
            stack.update(_described(self))
        meter.begin()
        more = step(self, *iterators)
        meter.end(float(self._last_logged_metrics.get("loss", math.nan)))  # nan: a stage that has none
        return more

    base.prepare_batch = counted
    base.BaseMegatronTrainer.run_train_step = timed
    base.BaseMegatronTrainer.save_checkpoint = lambda self: None
    megatron_sft_main()


def _flash_tower(self: Any) -> None:
    """Choose FlashAttention-2 for the tower, whatever the decoder uses."""
    self.hf_config._attn_implementation = "flash_attention_2"
    self.hf_config.vision_config._attn_implementation = "flash_attention_2"


def _described(trainer: Any) -> dict[str, Any]:
    """Return what is trained and how."""
    if trainer.args.gradient_accumulation_fusion:
        fused_gradients.check(torch.device("cuda"))
    model = trainer.unwrapped_models[0]
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    names = ("gradient_accumulation_fusion", "recompute_granularity", "micro_batch_size", "overlap_grad_reduce")
    settings = {name: str(vars(trainer.args)[name]) for name in names}
    return {"trained": trained, "frozen": frozen, "attention": str(trainer.args.attention_backend), **settings}


if __name__ == "__main__":
    main()
