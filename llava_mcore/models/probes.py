"""Records the outputs of modules under Hugging Face's names, to find the first layer that differs.

The meaning of tensors follows Megatron's own conventions (a query head comes before its key, the gate before the up
projection), not the mapping table: a table that swaps two of them in both directions is detected.

s: tokens, b: samples, f: features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.mllama.modeling_mllama import MllamaTextRMSNorm

from llava_mcore.models.audio.encoder import AudioTransformer
from llava_mcore.models.language.cross_attention import CrossAttention, CrossAttentionLayer
from llava_mcore.models.language.delta_net import PROJECTIONS, DeltaNet
from llava_mcore.models.language.experts import ExpertLayer
from llava_mcore.models.language.layers import DeepstackLayer
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.models.recorder import Recorder
from llava_mcore.models.vision.patches import PatchTransformer
from llava_mcore.models.vision.tiled import TiledTransformer
from llava_mcore.models.vision.transformer import NormedHeadsAttention, VisionTransformer
from llava_mcore.weights.names import HfNames, LayerNames

Gather = Callable[[Tensor], Tensor]


def watch_hf(
    recorder: Recorder, model: nn.Module, names: HfNames, shown_as: HfNames, num_kept: Mapping[int, int] | None = None
) -> None:
    """Record every module of a Hugging Face model. `names`: its own prefixes; `shown_as`: the folder's prefixes.

    num_kept: of how many tokens of the tower and the projection how many come first and are not padding.
    """
    pairs = [(names.vision, shown_as.vision), (names.projection, shown_as.projection), (names.text, shown_as.text)]
    pairs = list(dict.fromkeys(pairs))  # of some classes the projection is part of the tower
    for name, module in model.named_modules():
        for prefix, shown_prefix in pairs:
            if name.startswith(prefix):
                lengths = {} if num_kept is None or prefix == names.text else num_kept
                recorder.watch(
                    module, partial(_kept_of, shown_prefix + name.removeprefix(prefix), type(module), lengths)
                )


def _kept_of(name: str, kind: type[nn.Module], num_kept: Mapping[int, int], output: Any) -> dict[str, Tensor]:
    """Return a Hugging Face module's output as [b, s, f] without padding, if it is one."""
    outputs = _tensor_of(name, kind, output)
    return {key: x[:, : num_kept.get(x.shape[1], x.shape[1])] for key, x in outputs.items()}


def _tensor_of(name: str, kind: type[nn.Module], output: Any) -> dict[str, Tensor]:
    """Return a Hugging Face module's output as [b, s, f], if it is one."""
    x = output[0] if isinstance(output, tuple) else output
    if not isinstance(x, Tensor) or x.ndim < 2:
        return {}
    if x.ndim == 2:  # of packed patches
        return {name: x[None]}
    if kind in (Gemma3RMSNorm, MllamaTextRMSNorm) and x.ndim == 4:  # alone in normalizing heads [b, heads, s, f]
        x = x.transpose(1, 2)
    if x.ndim == 5:  # of the tiles of images [b, images, tiles, s, f]
        x = x.flatten(0, 2)
    if kind in (nn.Conv1d, nn.Conv2d):
        return {name: x.flatten(2).transpose(1, 2)}
    return {name: x.flatten(2)}


def watch_ours(recorder: Recorder, model: VisionLanguageModel, names: HfNames, gather: Gather) -> None:
    """Record one pipeline stage under the names of a Hugging Face folder.

    Args:
        gather: concatenates the tensor-parallel ranks' features [..., f / tp]; called by all ranks in the same order.
    """
    if model.pre_process:
        _watch_vision(recorder, model, names, gather)
        language = model.language_model
        embedding = language.embedding.word_embeddings
        recorder.watch(embedding, lambda out: {names.text + "embed_tokens": language.scaled(out)})
    for layer in model.language_model.decoder.layers:
        prefix = f"{names.text}layers.{layer.layer_number - 1}"
        _watch_layer(recorder, layer, prefix, model.language_model.shape.names, gather)
    if model.post_process:
        norm = model.language_model.decoder.final_layernorm
        recorder.watch(norm, lambda out: {names.text + "norm": _batch_first(out)})


def _watch_vision(recorder: Recorder, model: VisionLanguageModel, names: HfNames, gather: Gather) -> None:
    tower, v, p = model.vision_model, names.vision, names.projection
    ffn = tower.shape.ffn_size if isinstance(tower, PatchTransformer) else None
    for layer in tower.decoder.layers:
        prefix = f"{v}{tower.shape.layers_name}{layer.layer_number - 1}"
        _watch_layer(recorder, layer, prefix, tower.shape.names, gather, ffn)
    for name, output in model.connector.outputs(model.vision_projection).items():
        recorder.watch(output.module, partial(_connector_output, p + name, gather if output.divided else None))
    if isinstance(tower, PatchTransformer):
        recorder.watch(tower.conv1, lambda out: {v + tower.shape.conv_name: out[None]})
        if tower.shape.post_norm:
            recorder.watch(tower.ln_post, lambda out: {v + "post_layernorm": out[None]})
    elif isinstance(tower, AudioTransformer):
        # Of one clip: its rows have one more on both sides of what the second convolution reads.
        recorder.watch(tower.conv1, lambda out: {v + "conv1": out[..., 1:-1].transpose(1, 2)})
        recorder.watch(tower.conv2, lambda out: {v + "conv2": out.transpose(1, 2)})
        recorder.watch(tower.ln_post, lambda out: {v + "layer_norm": out[None]})
    elif isinstance(tower, TiledTransformer):
        _watch_tiled(recorder, tower, v, gather)
    else:
        _watch_ends(recorder, tower, v)


def _watch_tiled(recorder: Recorder, tower: TiledTransformer, v: str, gather: Gather) -> None:
    """Record the global layers of a tower for the tiles of an image, and what surrounds all layers."""
    for layer in tower.global_decoder.layers:
        prefix = f"{v}{tower.shape.global_layers_name}{layer.layer_number - 1}"
        _watch_layer(recorder, layer, prefix, tower.shape.names, gather)
    recorder.watch(tower.conv1, lambda out: {v + tower.shape.conv_name: out.flatten(2).transpose(1, 2)})
    recorder.watch(tower.ln_pre, lambda out: {v + "layernorm_pre": out.flatten(2)})
    recorder.watch(tower.ln_post, lambda out: {v + "layernorm_post": _batch_first(out)})


def _watch_ends(recorder: Recorder, tower: VisionTransformer, v: str) -> None:
    """Record what surrounds the layers of a tower for tiles."""
    shape = tower.shape
    recorder.watch(tower.conv1, lambda out: {v + shape.conv_name: out.flatten(2).transpose(1, 2)})
    if shape.pre_norm:
        recorder.watch_input(tower.ln_pre, v + "embeddings", lambda x: x)
        recorder.watch(tower.ln_pre, lambda out: {v + "pre_layrnorm": out})
    else:
        recorder.watch_input(tower.decoder.layers[0], v + "embeddings", _batch_first)
    if shape.post_norm:
        recorder.watch(tower.ln_post, lambda out: {v + "post_layernorm": out})


def _connector_output(name: str, gather: Gather | None, output: Any) -> dict[str, Tensor]:
    """Return a linear layer's or another module's output as [b, s, f]."""
    x = _with_bias(output) if isinstance(output, tuple) else output
    x = x[None] if x.ndim == 2 else x  # of packed patches
    return {name: x if gather is None else gather(x)}


def _watch_layer(
    recorder: Recorder,
    layer: TransformerLayer,
    prefix: str,
    hf: LayerNames,
    gather: Gather,
    ffn: int | None = None,
) -> None:
    """Record a decoder or encoder layer, whose outputs are [s, b, f]. `ffn`: the MLP's width without padding."""
    mlp, inside = layer.mlp, prefix + "."

    def into_mlp(out: Any) -> dict[str, Tensor]:
        parts = _batch_first(_with_bias(out)).chunk(1 + mlp.config.gated_linear_unit, dim=-1)
        return _named(inside, hf.into, [gather(x)[..., :ffn] for x in parts])

    # Norm and attention, then norm and MLP, in the order of the forward pass.
    to_images = isinstance(layer, CrossAttentionLayer)
    norm = layer.pre_cross_attn_layernorm if to_images else layer.input_layernorm
    recorder.watch(norm, lambda out: {inside + hf.norm_before: _batch_first(out)})
    if to_images:
        _watch_cross_attention(recorder, layer.cross_attention, inside + "cross_attn.", gather)
    elif isinstance(layer.self_attention, DeltaNet):
        _watch_delta_net(recorder, layer.self_attention, inside + "linear_attn.", gather)
    else:
        _watch_attention(recorder, layer.self_attention, inside, hf, gather)
    recorder.watch(layer.pre_mlp_layernorm, lambda out: {inside + hf.norm_between: _batch_first(out)})
    if isinstance(mlp, ExpertLayer):
        _watch_experts(recorder, mlp, inside + "mlp", gather)
    else:
        recorder.watch(mlp.linear_fc1, into_mlp)
        _watch_output(recorder, mlp.linear_fc2, inside, hf.out_of, hf.norm_after_mlp)
    recorder.watch(layer, lambda out: {prefix: _batch_first(_layer_output(layer, out))})


def _watch_experts(recorder: Recorder, mixture: ExpertLayer, name: str, gather: Gather) -> None:
    """Record what a router computes, before it chooses, a shared expert's matrices, and the sum of all outputs."""

    def gate_and_up(out: Any) -> dict[str, Tensor]:
        parts = [gather(x) for x in _batch_first(_with_bias(out)).flatten(0, 1)[None].chunk(2, dim=-1)]
        return _named(f"{name}.shared_expert.", ("gate_proj", "up_proj"), parts)

    def down(out: Any) -> dict[str, Tensor]:
        return {f"{name}.shared_expert.down_proj": _batch_first(_with_bias(out)).flatten(0, 1)[None]}

    def router_logits(hidden: Tensor) -> Tensor:
        return F.linear(_batch_first(hidden).flatten(0, 1), mixture.router.weight)[None]  # Hugging Face's is [b * s, e]

    if mixture.shared_experts is not None:
        recorder.watch(mixture.shared_experts.linear_fc1, gate_and_up)
        recorder.watch(mixture.shared_experts.linear_fc2, down)
    recorder.watch_input(mixture.router, f"{name}.gate", router_logits)
    recorder.watch(mixture, lambda out: {name: _batch_first(_with_bias(out))})


def _watch_attention(
    recorder: Recorder, attention: SelfAttention, inside: str, hf: LayerNames, gather: Gather
) -> None:  # fmt: skip
    def heads(name: str, out: Tensor) -> dict[str, Tensor]:
        return {name: gather(_batch_first(out).flatten(2))}

    recorder.watch(attention.linear_qkv, lambda out: _split_heads(attention, out, inside, hf, gather))
    for norm, name in ((attention.q_layernorm, "q_norm"), (attention.k_layernorm, "k_norm")):
        if norm is not None:
            recorder.watch(norm, partial(heads, f"{inside}self_attn.{name}"))
    if isinstance(attention, NormedHeadsAttention):
        recorder.watch(attention.query_norm, partial(heads, f"{inside}attention.q_norm"))
        recorder.watch(attention.key_norm, partial(heads, f"{inside}attention.k_norm"))
    _watch_output(recorder, attention.linear_proj, inside, hf.attention_out, hf.norm_after_attention)


def _watch_cross_attention(recorder: Recorder, attention: CrossAttention, inside: str, gather: Gather) -> None:
    """Record attention to images, of one sample: features of all its images follow each other, and one of zeros."""

    def heads(name: str, count: int | None, out: Tensor) -> dict[str, Tensor]:
        return {inside + name: gather(out[:count].flatten(1))[None]}

    recorder.watch(attention.linear_q, lambda out: {inside + "q_proj": gather(_batch_first(_with_bias(out)))})
    recorder.watch(attention.q_layernorm, partial(heads, "q_norm", None))
    recorder.watch(attention.k_layernorm, partial(heads, "k_norm", -1))
    recorder.watch(attention.linear_proj, lambda out: {inside + "o_proj": _batch_first(_with_bias(out))})


def _watch_delta_net(recorder: Recorder, net: DeltaNet, inside: str, gather: Gather) -> None:
    def projected(out: Any) -> dict[str, Tensor]:
        sections = _batch_first(_with_bias(out)).split(list(net.in_proj_split_sections), dim=-1)
        *mixed, gate, beta, alpha = (gather(x) for x in sections)
        parts = (torch.cat(mixed, dim=-1), gate, beta, alpha)
        return {inside + name: x for name, x in zip(PROJECTIONS, parts, strict=True)}

    def normed(out: Tensor) -> dict[str, Tensor]:  # [b, s, n, v]; Hugging Face's is [b * s * n, v]
        return {inside + "norm": gather(out.flatten(2)).unflatten(2, (-1, net.value_head_dim)).flatten(0, 2)[None]}

    recorder.watch(net.in_proj, projected)
    recorder.watch(net.out_norm, normed)
    recorder.watch(net.out_proj, lambda out: {inside + "out_proj": _batch_first(_with_bias(out))})


def _layer_output(layer: TransformerLayer, out: Any) -> Tensor:
    """Return a layer's hidden states, before features of the tower's inner layers are added, as Hugging Face has it."""
    if not isinstance(out, tuple):
        return out
    hidden_states, deepstack = out
    if isinstance(layer, DeepstackLayer) and deepstack is not None and layer.layer_number <= len(deepstack):
        return hidden_states - deepstack[layer.layer_number - 1]
    return hidden_states


def _watch_output(recorder: Recorder, linear: nn.Module, inside: str, name: str, norm: str | None) -> None:
    """Record the last layer of attention or MLP; a norm after it is its child."""
    if norm is None:
        recorder.watch(linear, lambda out: {inside + name: _batch_first(_with_bias(out))})
    else:
        child = linear.get_submodule("post_layernorm")
        recorder.watch_input(child, inside + name, _batch_first)
        recorder.watch(child, lambda out: {inside + norm: _batch_first(out)})


def _split_heads(
    attention: SelfAttention, output: Any, inside: str, hf: LayerNames, gather: Gather
) -> dict[str, Tensor]:
    """Split Megatron's groups into query, key and value [b, s, f]: query heads, then a key, then a value.

    An output gate comes after the queries; Hugging Face has it head by head with them.
    """
    groups = attention.num_query_groups_per_partition
    heads = attention.num_attention_heads_per_partition // groups
    gated = int(attention.config.attention_output_gate)
    mixed = _batch_first(_with_bias(output))
    by_group = mixed.unflatten(-1, (groups, heads * (1 + gated) + 2, -1))  # [b, s, groups, heads, dim]
    parts = list(by_group.split([heads] * (1 + gated) + [1, 1], dim=-2))
    if gated:
        parts[:2] = [torch.stack(parts[:2], dim=-2).flatten(-3, -2)]
    return _named(inside, hf.query_key_value, [gather(part.flatten(2)) for part in parts])


def _named(inside: str, names: tuple[str, ...], parts: list[Tensor]) -> dict[str, Tensor]:
    """Assign names to the parts; one name for several parts is that of a fused module."""
    if len(names) < len(parts):
        return {inside + names[0]: torch.cat(parts, dim=-1)}
    return {inside + name: part for name, part in zip(names, parts, strict=True)}


def _with_bias(output: tuple[Tensor, Tensor | None]) -> Tensor:
    """Add the bias that megatron-core's linear layers return separately."""
    x, bias = output
    return x if bias is None else x + bias


def _batch_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)
