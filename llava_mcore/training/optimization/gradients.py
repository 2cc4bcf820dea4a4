"""Gradients of a tower that computes on other pictures on every tensor-parallel rank: megatron-core's gradient
finalization does not know of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads

from llava_mcore.compat.megatron_gradients import gradient_ranges
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.parallel.groups import tensor_parallel_group


class TowerGradients:
    """Adds up the gradients of whole towers over the tensor-parallel ranks, once in a step."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], models: Sequence[VisionLanguageModel]) -> None:
        """chunks: the wrapped `models`."""
        of_towers = {p for model in models if model.pre_process for p in model.vision_model.parameters()}
        self._ranges = [x for chunk in chunks for x in gradient_ranges(chunk, of_towers)]

    def finalize(self, chunks: list[DistributedDataParallel], *args: Any, **kwargs: Any) -> None:
        """Finalize gradients as megatron-core does, then add up (called by megatron-core's schedules).

        They are divided by the number of tokens before they are added up.
        """
        finalize_model_grads(chunks, *args, **kwargs)
        for gradients in self._ranges:
            dist.all_reduce(gradients, group=tensor_parallel_group())
