"""Idefics2's connector on the ranks of a test world."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import Idefics2Config

from llava_mcore.mapping.table import Entry
from llava_mcore.models.connectors.perceiver import Perceiver
from tests.parallel.checks import join

MEGATRON = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
}


def build(hf: Idefics2Config, tp: int) -> nn.Module:
    """Build this rank's part."""
    config = TransformerConfig(tensor_model_parallel_size=tp, **MEGATRON, **Perceiver().config_from_hf(hf))
    return Perceiver().build(hf, config, input_size=hf.vision_config.hidden_size)


def entries(hf: Idefics2Config) -> dict[str, Entry]:
    return {entry.megatron: entry for entry in Perceiver().weight_entries(hf, megatron="", prefix="")}


def connector(tp: int, config: dict[str, Any], tensors: dict[str, Tensor], features: Tensor) -> dict[str, Any]:
    """Return the output, and the gradients of this rank's parameters for the sum of its squares."""
    groups = join(tp, 1)
    hf = Idefics2Config(**config)
    module, table = build(hf, tp), entries(hf)
    parameters = dict(module.named_parameters())
    assert parameters.keys() == table.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            entry = table[name]
            parameter.copy_(entry.shard.split(entry.to_megatron(tensors), tp)[groups.tp_rank])
    found: dict[str, Tensor] = {}
    for name, output in Perceiver().outputs(module).items():
        output.module.register_forward_hook(lambda _m, _i, out, key=name: found.update({key: _first(out).detach()}))
    features.requires_grad_()
    out = module(features)
    out.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    return {"out": out.detach(), "gradients": gradients, "features": features.grad, "outputs": found}


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
