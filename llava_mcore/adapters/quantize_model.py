"""Quantization of a model below adapters, experts included: each of their matrices by itself, so that it does not
matter which ranks divide them.

e: experts of this rank, n, k: rows and columns of an expert's matrix.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from llava_mcore.adapters.attach import linear_modules
from llava_mcore.adapters.linear_layers import MegatronLinear, ModelLayers
from llava_mcore.adapters.quantized import QUANTIZERS, Nf4, Quantized, frozen_linears, gather_parts, to_fp8, to_nf4
from llava_mcore.compat.megatron.frozen_linears import freeze_with
from llava_mcore.errors import ConfigError
from llava_mcore.files.sizes import size_text
from llava_mcore.models.language.experts import ExpertMatrices
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.parallel.groups import Groups
from llava_mcore.weights.table import REPLICATED

logger = logging.getLogger(__name__)


def quantize_model(models: Sequence[VisionLanguageModel], layers: ModelLayers, kind: str, groups: Groups) -> None:
    """Quantize the frozen linear layers and the experts of a rank's chunks, then move the chunks to the device; a
    collective call.

    Layers go to the device one by one, so it never holds the whole model in full precision.

    Raises:
        ConfigError: a package is missing, or the layout would divide blocks.
    """
    if kind == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError("--lora-quantize nf4 needs the package bitsandbytes: pip install 'llava-mcore[qlora]'")
    # Each layer in turn; what is not quantized follows.
    quantized_layers: list[Quantized] = []
    gather = partial(gather_parts, groups=groups)
    for model in models:
        for linear, module in frozen_linears(model, layers):
            weight = module.weight.detach().to(groups.device)
            quantized = QUANTIZERS[kind](weight, linear, groups.tp_size, groups.tp_rank, gather)
            freeze_with(module, quantized.dequantize)
            quantized_layers.append(quantized)
        for tensor, experts in frozen_experts(model, layers):
            quantized = quantize_experts(experts.weight.detach().to(groups.device), tensor, kind)
            experts.freeze_with(partial(_stacked, quantized, experts.weight.shape), groups.device)
            quantized_layers.append(quantized)
        model.to(groups.device)
    # What was gained.
    weights, num_bytes = sum(x.num_weights for x in quantized_layers), sum(x.num_bytes for x in quantized_layers)
    logger.info(
        "%s: %s weights of this rank's %d layers take %s",
        kind,
        f"{weights:,}",
        len(quantized_layers),
        size_text(num_bytes),
    )


def keep_experts_in_fp8(models: Sequence[VisionLanguageModel], layers: ModelLayers) -> None:
    """Keep the experts of a rank's chunks, which multiply in FP8, in FP8 only."""
    for model in models:
        for _, experts in frozen_experts(model, layers):
            experts.keep_in_fp8()


def _stacked(quantized: Quantized, shape: torch.Size) -> Tensor:
    """Return the matrices [e, n, k] again."""
    return quantized.dequantize().view(shape)


def frozen_experts(model: VisionLanguageModel, layers: ModelLayers) -> Iterator[tuple[MegatronLinear, ExpertMatrices]]:
    """Yield the tensors of experts of a stage, which are never trained beside adapters."""
    modules = linear_modules(model)
    for tensor in layers.expert_tensors:
        module = modules.get(tensor.name)
        if module is not None:
            assert isinstance(module, ExpertMatrices)
            yield tensor, module


def quantize_experts(weight: Tensor, tensor: MegatronLinear, kind: str) -> Quantized:
    """Quantize matrices [e, n, k], which become one below the other: [e * n, k].

    Raises:
        ConfigError: blocks would cross the borders of rows.
    """
    one = replace(tensor, entry=replace(tensor.entry, shard=REPLICATED))  # a matrix that no rank divides
    if kind == "fp8":
        return to_fp8(weight.flatten(0, 1), one, 1, 0, _alone)
    return _below_each_other([to_nf4(matrix, one, 1, 0, _alone) for matrix in weight])


def _alone(x: Tensor) -> list[Tensor]:
    return [x]


def _below_each_other(parts: list[Nf4]) -> Nf4:
    """Return several matrices as one. Each keeps its own blocks of scales, and their mean."""
    first_scale, num_scales = [], 0
    for part in parts:
        first_scale.append(part.first_scale + num_scales)
        num_scales += len(part.scales)
    return Nf4(
        codes=torch.cat([x.codes for x in parts]),
        scale_codes=torch.cat([x.scale_codes for x in parts]),
        scales=torch.cat([x.scales for x in parts]),
        position=torch.cat([x.position for x in parts]),
        first_scale=torch.cat(first_scale),
        offset=torch.cat([x.offset for x in parts]),
        map=parts[0].map,
        dtype=parts[0].dtype,
    )
