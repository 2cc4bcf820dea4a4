"""Transformer Engine's layers for a tower, with fewer kernels than megatron-core's specification of them starts.

A tower's tensors are small beside a decoder's: additions and copies around the products take a good part of its time,
and the host needs longer to start kernels than they run. `benchmarks/vision_fp8.py` measures both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_transformer_engine_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import nn

from llava_mcore.compat.megatron_layers import split_gradients_without_copy
from llava_mcore.compat.required import replace_name
from llava_mcore.models.activations import StatelessActivation, quick_gelu


def te_layer_spec() -> ModuleSpec:
    """Return the encoder layer whose products add their biases and sum up the gradients of these."""
    spec = get_vit_layer_with_transformer_engine_spec()
    layer = spec.submodules
    attention_layer, mlp = layer.self_attention.submodules, layer.mlp.keywords["submodules"]
    attention_layer.linear_proj = _adding_its_bias(attention_layer.linear_proj)
    mlp.linear_fc1, mlp.linear_fc2 = _adding_its_bias(mlp.linear_fc1), _adding_its_bias(mlp.linear_fc2)
    return spec


def _adding_its_bias(linear: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return how to build a linear layer that does not leave its bias to the caller."""

    def build(*sizes: int, **options: Any) -> nn.Module:
        return linear(*sizes, **options | {"skip_bias_add": False})

    return build


def use_fewer_kernels(encoder: TransformerBlock) -> None:
    """Let one kernel do what several do in an encoder of `te_layer_spec`."""
    from transformer_engine.pytorch.ops import QGELU, SwiGLU  # on GPUs only

    config = encoder.config
    split_gradients_without_copy()
    for layer in encoder.layers:
        for linear in (layer.self_attention.linear_proj, layer.mlp.linear_fc2):
            # Set for every row-parallel layer, but only a sum over ranks must come between product and bias.
            replace_name(linear, "gemm_bias_unfused_add", linear.tp_size > 1)
        if config.activation_func is quick_gelu:
            layer.mlp.activation_func = StatelessActivation(QGELU())
        elif config.use_te_activation_func:
            layer.mlp.activation_func = StatelessActivation(SwiGLU())
