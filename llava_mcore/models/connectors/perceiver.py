"""Idefics2's connector: a gated MLP to the language model's width, then latents that read an image's features.

An image becomes as many features as there are latents, whatever its size (perceiver resampler, Alayrac et al. 2022,
arXiv 2204.14198). The features of all images are packed; attention keeps images apart by their lengths.

p: images, n: features of all images, l: latents of an image, w: the tower's width, h: the language model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import PretrainedConfig

from llava_mcore.errors import ConversionError
from llava_mcore.media.batch_fields import MEDIA_SEQLENS
from llava_mcore.models.activations import activation
from llava_mcore.models.connectors.connector import Connector, Output
from llava_mcore.models.connectors.perceiver_resampler import PerceiverResampler
from llava_mcore.weights.layouts import Concat
from llava_mcore.weights.table import COLUMN, GATED_COLUMN, REPLICATED, ROW, Entry

_GATED_WIDTH = 4
"""Width of the MLPs after the latents' attention, in hidden sizes: Idefics2PerceiverLayer has no setting for it."""
_NORMS = ("input_latents_norm", "input_context_norm", "post_attention_layernorm")
_LINEARS = {"linear_q": "q_proj", "linear_k": "k_proj", "linear_v": "v_proj"}


class Perceiver(Connector):
    """`modality_projection`, then `perceiver_resampler`, without biases."""

    def config_from_hf(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields of the resampler; its hidden size is the language model's.

        Raises:
            ConversionError: the perceiver has another width, its key/value heads do not divide its heads, or the
                language model's config has no `hidden_act`.
        """
        perceiver, width = hf.perceiver_config, hf.text_config.hidden_size
        heads, groups = perceiver.resampler_n_heads, perceiver.num_key_value_heads
        # Refuse values that do not fit together.
        if perceiver.hidden_size != width or heads % groups:
            raise ConversionError(
                f"perceiver_config: hidden_size {perceiver.hidden_size} must be the language model's {width}, and "
                f"resampler_n_heads {heads} a multiple of num_key_value_heads {groups}"
            )
        if "hidden_act" not in hf.text_config.to_dict():
            raise ConversionError(
                f"text_config has no hidden_act, from which transformers' Idefics2 takes its connector's activation: "
                f"{hf.text_config.model_type} cannot be its language model; take Mistral, Llama or Qwen, for example"
            )
        return {
            # As transformers' module: gated MLPs, RMSNorm, no biases.
            "num_layers": perceiver.resampler_depth,
            "hidden_size": width,
            "ffn_hidden_size": _GATED_WIDTH * width,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "kv_channels": perceiver.resampler_head_dim,
            "activation_func": activation(perceiver.hidden_act, where="perceiver_config.hidden_act"),
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "normalization": "RMSNorm",
            "layernorm_epsilon": perceiver.rms_norm_eps,
            "attention_dropout": perceiver.attention_dropout,
            "hidden_dropout": 0.0,
        }

    def build(self, hf: PretrainedConfig, config: TransformerConfig, *, input_size: int) -> nn.Module:
        """Build the connector for features of width `input_size`."""
        text = hf.text_config
        projection = replace(
            config,
            ffn_hidden_size=text.intermediate_size,
            activation_func=activation(text.hidden_act, where="text_config.hidden_act"),
        )
        num_latents = hf.perceiver_config.resampler_n_latents
        return PerceiverResampler(config, projection, input_size=input_size, num_latents=num_latents)

    def run(self, module: nn.Module, features: Tensor, media: Mapping[str, Tensor], max_seqlen: int) -> Tensor:
        """Return the features [p, l, h] of images whose lengths are MEDIA_SEQLENS."""
        result: Tensor = module(features, media[MEDIA_SEQLENS], max_seqlen)
        return result

    def num_features(self, hf: PretrainedConfig, num_features: int) -> int:
        """Return the number of latents."""
        return int(hf.perceiver_config.resampler_n_latents)

    def weight_entries(self, hf: PretrainedConfig, *, megatron: str, prefix: str) -> list[Entry]:
        """Return the entries of the MLP, the latents and their layers."""
        resampler = prefix + "perceiver_resampler."
        m, h = megatron + "layers.{layer}.", resampler + "layers.{layer}."
        layer = [
            *(Entry(f"{m}{name}.weight", f"{h}{name}.weight", REPLICATED) for name in _NORMS),
            *(
                Entry(f"{m}{megatron_name}.weight", f"{h}self_attn.{name}.weight", COLUMN)
                for megatron_name, name in _LINEARS.items()
            ),
            Entry(m + "linear_proj.weight", h + "self_attn.o_proj.weight", ROW),
            *_gated_entries(m + "mlp.", h + "mlp."),
        ]
        layers = range(hf.perceiver_config.resampler_depth)
        return [
            *_gated_entries(megatron + "modality_projection.", prefix + "modality_projection."),
            Entry(megatron + "latents", resampler + "latents", REPLICATED),
            *(x for entry in layer for x in entry.expand(layer=layers)),
            Entry(megatron + "norm.weight", resampler + "norm.weight", REPLICATED),
        ]

    def products(self, hf: PretrainedConfig, *, input_size: int, num_features: int, num_images: int = 1) -> list[int]:
        """Return the FLOPs of all matrices; products of scores, which have no weights, are `attention`.

        Args:
            input_size: w.
            num_features: n.
            num_images: p.
        """
        text, perceiver = hf.text_config, hf.perceiver_config
        width, inner = text.hidden_size, text.intermediate_size
        latents = num_images * perceiver.resampler_n_latents
        queries = perceiver.resampler_n_heads * perceiver.resampler_head_dim
        keys = perceiver.num_key_value_heads * perceiver.resampler_head_dim
        layer = [
            2 * latents * width * queries,
            2 * 2 * (num_features + latents) * width * keys,
            2 * latents * queries * width,
            3 * 2 * latents * width * _GATED_WIDTH * width,
        ]
        projection = [2 * 2 * num_features * input_size * inner, 2 * num_features * inner * width]
        return projection + perceiver.resampler_depth * layer

    def attention(self, hf: PretrainedConfig, *, num_features: int, num_images: int) -> int:
        """Return the FLOPs of scores and of the sums by them: the latents of an image see its features and
        themselves."""
        perceiver = hf.perceiver_config
        latents = perceiver.resampler_n_latents
        num_pairs = latents * (num_features + num_images * latents)
        return int(
            4 * num_pairs * perceiver.resampler_depth * perceiver.resampler_n_heads * perceiver.resampler_head_dim
        )

    def outputs(self, module: nn.Module) -> Mapping[str, Output]:
        """Return the modules that exist in both models: not gate and value of MLPs, which are fused here."""
        resampler = "perceiver_resampler."
        pairs = {"modality_projection.down_proj": ("modality_projection.linear_fc2", False)}
        for i, _ in enumerate(module.get_submodule("layers").children()):
            megatron_prefix, hf_prefix = f"layers.{i}.", f"{resampler}layers.{i}."
            pairs |= {hf_prefix + name: (megatron_prefix + name, False) for name in _NORMS}
            pairs |= {
                f"{hf_prefix}self_attn.{name}": (megatron_prefix + linear, True) for linear, name in _LINEARS.items()
            }
            pairs[hf_prefix + "self_attn.o_proj"] = (megatron_prefix + "linear_proj", False)
            pairs[hf_prefix + "mlp.down_proj"] = (megatron_prefix + "mlp.linear_fc2", False)
        pairs[resampler + "norm"] = ("norm", False)
        return {
            name: Output(module.get_submodule(megatron_name), divided)
            for name, (megatron_name, divided) in pairs.items()
        }


def _gated_entries(megatron: str, hf: str) -> list[Entry]:
    gate_and_up = (hf + "gate_proj.weight", hf + "up_proj.weight")
    return [
        Entry(megatron + "linear_fc1.weight", gate_and_up, GATED_COLUMN, Concat(2)),
        Entry(megatron + "linear_fc2.weight", hf + "down_proj.weight", ROW),
    ]
