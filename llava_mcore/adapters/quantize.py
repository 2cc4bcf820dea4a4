"""A frozen language model whose matrices are kept in fewer bits, and restored for each product or multiplied in FP8."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import importlib.util
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llava_mcore.adapters.attach import linear_modules
from llava_mcore.adapters.linear_layers import MegatronLinear, ModelLayers
from llava_mcore.adapters.quantized import QUANTIZERS, Quantized
from llava_mcore.compat.frozen_linears import freeze_with, keep_in_fp8
from llava_mcore.errors import ConfigError
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.parallel.groups import Groups

logger = logging.getLogger(__name__)

PART = "language_model"
"""The part whose layers are quantized: it has nearly all weights."""


def quantize_model(models: Sequence[VisionLanguageModel], layers: ModelLayers, kind: str, groups: Groups) -> None:
    """Quantize the frozen linear layers of a rank's chunks, then move the chunks to the device; a collective call.

    Layers go to the device one by one, so it never holds the whole model in full precision.

    Raises:
        ConfigError: a package is missing, or the layout would divide blocks.
    """
    if kind == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError("--lora-quantize nf4 needs the package bitsandbytes: pip install 'llava-mcore[qlora]'")
    quantized_layers: list[Quantized] = []
    for model in models:
        for linear, module in frozen_linears(model, layers):
            weight = module.weight.detach().to(groups.device)
            quantized = QUANTIZERS[kind](weight, linear, groups.tp_size, groups.tp_rank, lambda x: _gather(x, groups))
            freeze_with(module, quantized.dequantize)
            quantized_layers.append(quantized)
        model.to(groups.device)
    weights, num_bytes = sum(x.num_weights for x in quantized_layers), sum(x.num_bytes for x in quantized_layers)
    logger.info(
        "%s: %s weights of this rank's %d layers take %.3f GiB",
        kind,
        f"{weights:,}",
        len(quantized_layers),
        num_bytes / 2**30,
    )


def multiply_in_fp8(models: Sequence[VisionLanguageModel], layers: ModelLayers) -> None:
    """Keep the frozen linear layers of a rank's chunks in FP8 only; Transformer Engine multiplies in it."""
    modules = [module for model in models for _, module in frozen_linears(model, layers)]
    for module in modules:
        keep_in_fp8(module)
    weights = sum(module.weight.numel() for module in modules)
    logger.info("fp8: %s weights of this rank's %d layers have no 16-bit copy", f"{weights:,}", len(modules))


def frozen_linears(model: VisionLanguageModel, layers: ModelLayers) -> Iterator[tuple[MegatronLinear, Any]]:
    """Yield the linear layers of PART that are not trained."""
    modules = linear_modules(model)
    for linear in layers.linears:
        module = modules.get(linear.name)
        if module is not None and linear.members[0].part == PART and not module.weight.requires_grad:
            yield linear, module


def _gather(x: Tensor, groups: Groups) -> list[Tensor]:
    """Return a tensor of every tensor-parallel rank."""
    if groups.tp_size == 1:
        return [x]
    parts = [torch.empty_like(x) for _ in range(groups.tp_size)]
    dist.all_gather(parts, x.contiguous(), group=groups.tensor_parallel)
    return parts
