"""The layers of a decoder's stage: which classes of megatron-core, Transformer Engine and our own they consist of."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from llava_mcore.compat import flash_attention_4
from llava_mcore.models.attention.flash import FlashAttention, decoder_uses_flash_attention
from llava_mcore.models.attention.sdpa import SDPAttention
from llava_mcore.models.language.cross_attention import cross_layer
from llava_mcore.models.language.delta_net import delta_layer
from llava_mcore.models.language.experts import EXPERTS
from llava_mcore.models.language.layers import DeepstackLayer, NormedRowParallelLinear, TwoRopeSelfAttention
from llava_mcore.models.language.shape import DecoderShape
from llava_mcore.models.norms import TorchNorm
from llava_mcore.models.rotary import TokenRopeSelfAttention
from llava_mcore.weights.names import FUSED_NORMS

_NORM_BEFORE_MLP = "pre_mlp_layernorm."


def block_spec(
    config: TransformerConfig, shape: DecoderShape, vp_stage: int | None, *, plain_linears: bool = False
) -> TransformerBlockSubmodules:
    """Return the spec of a stage's layers: Transformer Engine's, or torch's for a machine without it.

    Args:
        plain_linears: megatron-core's own linear layers, with norms before them, also among Transformer Engine's.
    """
    if config.transformer_impl == "transformer_engine":
        flash_attention_4.keep_from_engine(config.kv_channels)
        spec = get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=config.qk_layernorm, use_te_activation_func=config.use_te_activation_func
        )
        if decoder_uses_flash_attention(config):
            spec.submodules.self_attention.submodules.core_attention = FlashAttention
        spec = _with_own_classes(with_plain_linears(spec) if plain_linears else spec, shape)
        return _block(spec, config, shape, vp_stage, norm=TENorm)
    # Without Transformer Engine: torch's attention and norms.
    spec = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
    layer = spec.submodules
    attention = layer.self_attention.submodules
    attention.core_attention = partial(SDPAttention, softcap=shape.attention_softcap)
    layer.input_layernorm = layer.pre_mlp_layernorm = TorchNorm
    attention.q_layernorm = attention.k_layernorm = TorchNorm if config.qk_layernorm else IdentityOp
    if shape.local_rope is not None:
        layer.self_attention.module = TwoRopeSelfAttention
    if shape.post_norms:
        attention.linear_proj = NormedRowParallelLinear
        layer.mlp = partial(
            MLP.as_mlp_submodule,
            submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=NormedRowParallelLinear),
        )
    spec = _with_own_classes(spec, shape)
    return _block(spec, config, shape, vp_stage, norm=TorchNorm)


def _block(
    spec: ModuleSpec, config: TransformerConfig, shape: DecoderShape, vp_stage: int | None, *, norm: Any
) -> TransformerBlockSubmodules:
    """Return the spec of a stage's layers: some may have a delta net in place of their attention, some experts in place
    of their MLP, some attend to images."""
    num_layers = get_num_layers_to_build(config, vp_stage)
    first = get_transformer_layer_offset(config, vp_stage)
    layers = [
        _layer(spec, norm, has_delta_net=is_delta, has_experts=has_experts)
        for is_delta, has_experts in zip(
            _chosen(config.linear_attention_freq, first, num_layers),
            _chosen(config.moe_layer_freq if config.num_moe_experts else None, first, num_layers),
            strict=True,
        )
    ]
    for layer in shape.cross_layers:
        if first <= layer < first + num_layers:
            layers[layer - first] = cross_layer(spec, norm, config)
    return TransformerBlockSubmodules(layers, layer_norm=norm)


def _chosen(per_layer: Any, first: int, count: int) -> list[bool]:
    """Return for each layer of a stage whether it is of a kind. per_layer: None if no layer is."""
    if per_layer is None:
        return [False] * count
    assert isinstance(per_layer, list), "the family's config has a number for each layer"
    return [bool(x) for x in per_layer[first : first + count]]


def _layer(spec: ModuleSpec, norm: Any, *, has_delta_net: bool, has_experts: bool) -> ModuleSpec:
    """Return the spec of a layer. norm: the norm before experts."""
    spec = delta_layer(spec) if has_delta_net else spec
    if not has_experts:
        return spec
    # An MLP's norm is saved as a part of its first matrix, as Transformer Engine has it. Experts have their own.
    layer = spec.submodules
    names = {name: saved for name, saved in layer.sharded_state_dict_keys_map.items() if name != _NORM_BEFORE_MLP}
    with_experts = replace(layer, mlp=EXPERTS, pre_mlp_layernorm=norm, sharded_state_dict_keys_map=names)
    return replace(spec, submodules=with_experts)


def with_plain_linears(spec: ModuleSpec) -> ModuleSpec:
    """Return Transformer Engine's layer with its norms and attention, but megatron-core's own linear layers."""
    layer = spec.submodules
    attention, mlp = layer.self_attention.submodules, layer.mlp.keywords["submodules"]
    layer.input_layernorm = layer.pre_mlp_layernorm = TENorm
    attention.linear_qkv, attention.linear_proj = ColumnParallelLinear, RowParallelLinear
    mlp.linear_fc1, mlp.linear_fc2 = ColumnParallelLinear, RowParallelLinear
    layer.sharded_state_dict_keys_map = FUSED_NORMS
    return spec


def _with_own_classes(spec: ModuleSpec, shape: DecoderShape) -> ModuleSpec:
    """Use our attention class, and `DeepstackLayer` if vision features are also added in later layers."""
    if shape.local_rope is None:
        spec.submodules.self_attention.module = TokenRopeSelfAttention
    if shape.deepstack:
        spec.module = DeepstackLayer
    return spec
