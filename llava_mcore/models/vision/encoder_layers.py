"""Layers of towers: configuration and weight entries, Transformer Engine's layers, the padded width of an MLP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.models.vision.vit_layer_specs import (
    get_vit_layer_with_local_spec,
    get_vit_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from transformers import PretrainedConfig

from llava_mcore.compat import flash_attention_4
from llava_mcore.compat.megatron.layers import split_gradients_without_copy
from llava_mcore.compat.required import replace_name
from llava_mcore.errors import ConversionError
from llava_mcore.models.activations import StatelessActivation, activation, quick_gelu
from llava_mcore.models.attention.sdpa import SDPAttention
from llava_mcore.models.vision.features import num_patches
from llava_mcore.weights.layouts import Concat, Copy, FuseQKV, PadColumns, PadParts, Regroup, Reshape, TensorTransform
from llava_mcore.weights.names import FUSED_NORMS, LayerNames
from llava_mcore.weights.table import COLUMN, GATED_COLUMN, REPLICATED, ROW, Entry

WEIGHT_BIAS = ("weight", "bias")

# CLIP's and SigLIP's names.
USUAL_NAMES = LayerNames(
    norm_before="layer_norm1",
    query_key_value=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_out="self_attn.out_proj",
    norm_between="layer_norm2",
    into=("mlp.fc1",),
    out_of="mlp.fc2",
)


def transformer_fields(hf: PretrainedConfig, num_layers: int) -> dict[str, Any]:
    """Return megatron-core TransformerConfig fields of CLIP's and SigLIP's configs, for the layers that are used."""
    return encoder_fields(hf, num_layers) | {
        "ffn_hidden_size": hf.intermediate_size,
        "activation_func": activation(hf.hidden_act, where="vision_config.hidden_act"),
        "attention_dropout": hf.attention_dropout,
    }


def encoder_fields(hf: PretrainedConfig, num_layers: int) -> dict[str, Any]:
    """Return the TransformerConfig fields that every tower's config gives under the same names."""
    return {
        "num_layers": num_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "normalization": "LayerNorm",
        "layernorm_epsilon": hf.layer_norm_eps,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "hidden_dropout": 0.0,
    }


def require(
    hf: PretrainedConfig, expected: Mapping[str, Any], *, section: str = "vision_config", advice: str = ""
) -> None:
    """Check required values in a tower's config. ConversionError lists all others, and ends with `advice`."""
    values = hf.to_dict()
    mismatches = [
        f"{section}.{key} = {values[key]} is not supported; it must be {value}"
        for key, value in expected.items()
        if values[key] != value
    ]
    if mismatches:
        raise ConversionError("\n".join([*mismatches, *([advice] if advice else [])]))


def embedding_entries(hf: PretrainedConfig, *, megatron: str, prefix: str, conv: str) -> list[Entry]:
    """Return the entries of class token, patches and positions, the latter with a batch dimension of one.

    `conv`: the convolution's name below prefix.
    """
    width, rows = hf.hidden_size, num_patches(hf) + 1
    table = Reshape((1, rows, width), (rows, width))
    return [
        Entry(megatron + "class_token", prefix + "embeddings.cls_token", REPLICATED),
        *Entry(megatron + "conv1.{wb}", f"{prefix}{conv}.{{wb}}", REPLICATED).expand(wb=WEIGHT_BIAS),
        Entry(megatron + "position_embeddings.weight", prefix + "embeddings.position_embeddings", REPLICATED, table),
    ]


def layer_entries(
    hf: PretrainedConfig,
    *,
    megatron: str,
    prefix: str,
    layers: range,
    names: LayerNames = USUAL_NAMES,
    gated: bool = False,
    norm_bias: bool = True,
    qkv_bias: bool = True,
    ffn: tuple[int, int] | None = None,
) -> list[Entry]:
    """Return the entries of some encoder layers.

    Args:
        prefix: of the layers in the files, up to the number.
        names: of the modules inside a layer.
        gated: whether the MLP's first matrix holds a gate and a value, of equal size.
        norm_bias: whether norms have one. qkv_bias: whether queries, keys and values have one.
        ffn: the width inside the MLPs in the files, and in the model; None: they are equal.
    """
    m, h = megatron + "decoder.layers.{layer}.", prefix + "{layer}."
    # Several tensors of a file may be one in the model, and MLPs may be wider there.
    qkv, into = (tuple(f"{h}{name}.{{wb}}" for name in x) for x in (names.query_key_value, names.into))
    heads = hf.num_attention_heads
    fuse: TensorTransform = FuseQKV(heads, heads) if len(qkv) > 1 else Regroup(heads, heads)
    stack: TensorTransform = Concat(len(into)) if len(into) > 1 else Copy()
    narrow: TensorTransform = Copy()
    if ffn is not None and ffn[0] != ffn[1]:
        stack, narrow = PadParts(len(into), *ffn), PadColumns(*ffn)
    # Norms are whole on every rank, and may lack biases; the others are divided by columns or rows.
    norms = [
        Entry(m + "input_layernorm.{wb}", f"{h}{names.norm_before}.{{wb}}", REPLICATED),
        Entry(m + "pre_mlp_layernorm.{wb}", f"{h}{names.norm_between}.{{wb}}", REPLICATED),
    ]
    into_mlp = [Entry(m + "mlp.linear_fc1.{wb}", into, GATED_COLUMN if gated else COLUMN, stack)]
    templates = [
        Entry(m + "self_attention.linear_proj.weight", f"{h}{names.attention_out}.weight", ROW),
        Entry(m + "self_attention.linear_proj.bias", f"{h}{names.attention_out}.bias", REPLICATED),
        Entry(m + "mlp.linear_fc2.weight", f"{h}{names.out_of}.weight", ROW, narrow),
        Entry(m + "mlp.linear_fc2.bias", f"{h}{names.out_of}.bias", REPLICATED),
    ]
    heads_in = [Entry(m + "self_attention.linear_qkv.{wb}", qkv, COLUMN, fuse)]
    of_norms, of_qkv = (WEIGHT_BIAS if has_bias else WEIGHT_BIAS[:1] for has_bias in (norm_bias, qkv_bias))
    return [
        x
        for entries, endings in (
            (norms, of_norms),
            (into_mlp, WEIGHT_BIAS),
            (heads_in, of_qkv),
            (templates, WEIGHT_BIAS),
        )
        for entry in entries
        for x in entry.expand(layer=layers, wb=endings)
    ]


def scale_entries(*, megatron: str, prefix: str, layers: range, scales: tuple[str, str]) -> list[Entry]:
    """Return the entries of layer scales, after attention and after the MLP."""
    m, h = megatron + "decoder.layers.{layer}.", prefix + "{layer}."
    places = zip(("self_attn_bda.scale", "mlp_bda.scale"), scales, strict=True)
    templates = [Entry(m + megatron_name, h + hf_name, REPLICATED) for megatron_name, hf_name in places]
    return [x for entry in templates for x in entry.expand(layer=layers)]


def unused_layers(entries: list[Entry], num_layers: int) -> dict[str, str]:
    """Return the tensors of layers after the last feature layer, with the reason."""
    reason = f"vision layer after the last feature layer ({num_layers})"
    return {name: reason for entry in entries for name in entry.hf_names}


def unused_norm(name: str) -> dict[str, str]:
    """Return the tower's last norm, with the reason."""
    return {f"{name}.{wb}": "norm after the last vision layer" for wb in WEIGHT_BIAS}


def encoder_layer_spec(
    config: TransformerConfig, norm: type[nn.Module] = WrappedTorchNorm, *, attends_by_engine: bool = True
) -> ModuleSpec:
    """Return the encoder layer: Transformer Engine's, or torch's with this norm for a machine without it.

    Args:
        attends_by_engine: the caller does not replace the layer's attention.
    """
    if config.transformer_impl == "transformer_engine":
        if attends_by_engine:
            flash_attention_4.keep_from_engine(config.kv_channels)
        return _te_layer_spec()
    spec = get_vit_layer_with_local_spec()
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = norm
    layer.self_attention.submodules.core_attention = SDPAttention
    layer.sharded_state_dict_keys_map = FUSED_NORMS
    return spec


def _te_layer_spec() -> ModuleSpec:
    """Return the encoder layer whose products add their biases and sum up the gradients of these.

    That is Transformer Engine's layer with fewer kernels than megatron-core's specification starts. A tower's tensors
    are small beside a decoder's: additions and copies around the products take a good part of its time, and the host
    needs longer to start kernels than they run. `benchmarks/vision_fp8.py` measures both.
    """
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


def without_bias(linear: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return how to build a linear layer without a bias in a layer whose others have one."""

    def build(*sizes: int, **options: Any) -> nn.Module:
        return linear(*sizes, **options | {"bias": False})

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


_MULTIPLE = 128
"""Then each of up to eight ranks has a multiple of 16, and of 16-bit numbers cuBLAS wants 8 (its manual, "Tensor Core
Usage")."""


def padded_width(width: int) -> int:
    """Return the width of an MLP in the model, which GPUs multiply fast and more ranks can divide.

    The outputs for zero rows of the first matrix and its bias are zero, activation functions keep that, and zero
    columns of the second matrix ignore them. Their gradients are zero too, so that they stay zero, and exports leave
    them out. It does not depend on the number of ranks, nor do checkpoints.
    """
    return -(-width // _MULTIPLE) * _MULTIPLE


@torch.no_grad()
def clear_padding(mlp: MLP, width: int, *, tp_rank: int) -> None:
    """Set to zero what a rank's part of a new MLP has beyond its width.

    Args:
        width: in Hugging Face's files; where it is gated, of the gate alone.
    """
    into, out_of = mlp.linear_fc1, mlp.linear_fc2
    num_columns = out_of.weight.shape[1]
    num_used = min(max(width - tp_rank * num_columns, 0), num_columns)
    for parameter in (into.weight, into.bias):
        for part in parameter.split(num_columns):  # gate and value, or all of it
            part[num_used:] = 0
    out_of.weight[:, num_used:] = 0
