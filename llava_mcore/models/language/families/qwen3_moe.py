"""Qwen3-MoE: Qwen3's decoder with a mixture of experts in place of the MLP of all or some layers.

A router chooses `num_experts_per_tok` of the experts for each token. Experts are gated MLPs; no token is dropped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from transformers import PretrainedConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextRotaryEmbedding

from llava_mcore.errors import ConversionError
from llava_mcore.models.language.families.dense import (
    head_dim,
    head_norm_entries,
    mlp_entries,
    norm_entries,
    projection_entries,
)
from llava_mcore.models.language.families.qwen3 import Qwen3
from llava_mcore.models.language.shape import DecoderShape, mrope_from_hf
from llava_mcore.weights.expert_files import ExpertForm, ExpertSizes, expert_entries, expert_form
from llava_mcore.weights.names import TextNames
from llava_mcore.weights.table import Entry


def is_sparse(hf: PretrainedConfig) -> list[bool]:
    """Return whether each layer has experts, by `decoder_sparse_step` and `mlp_only_layers`."""
    return [i not in hf.mlp_only_layers and (i + 1) % hf.decoder_sparse_step == 0 for i in range(hf.num_hidden_layers)]


def expert_sizes(hf: PretrainedConfig) -> ExpertSizes:
    """Return the sizes of a layer's experts."""
    return ExpertSizes(hf.num_experts, hf.hidden_size, hf.moe_intermediate_size)


def expert_fields(hf: PretrainedConfig, sparse: list[bool], *, normalizes: bool) -> dict[str, Any]:
    """Return megatron-core TransformerConfig fields about experts, with transformers' arithmetic.

    Args:
        sparse: whether each layer has experts.
        normalizes: whether the weights of the chosen experts add up to 1.

    Raises:
        ConversionError: no layer has experts, or fewer experts than a token needs.
    """
    if not any(sparse):
        raise ConversionError(
            "text_config: no layer has experts by decoder_sparse_step and mlp_only_layers; a dense model has the "
            "model_type qwen3"
        )
    if hf.num_experts_per_tok > hf.num_experts:
        raise ConversionError(
            f"text_config.num_experts_per_tok = {hf.num_experts_per_tok} exceeds num_experts = {hf.num_experts}"
        )
    if hf.num_experts_per_tok == 1 and normalizes:
        raise ConversionError(
            "text_config.num_experts_per_tok = 1 with normalized weights (norm_topk_prob) gives every expert weight 1, "
            "so the router would get no gradient: this is not supported"
        )
    return {
        "num_moe_experts": hf.num_experts,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_layer_freq": [int(x) for x in sparse],
        # Softmax over all experts, then the largest divided by their sum, is softmax over the largest.
        "moe_router_pre_softmax": not normalizes,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_dtype": None,  # logits in the parameters' precision, probabilities in fp32
    }


class Qwen3Moe(Qwen3):
    """Qwen3 with experts."""

    model_types = ("qwen3_moe",)
    usual_form: ClassVar[ExpertForm] = ExpertForm.PER_EXPERT
    """How published files have the experts."""

    def normalizes(self, hf: PretrainedConfig) -> bool:
        """Return whether the weights of the chosen experts add up to 1."""
        return bool(hf.norm_topk_prob)

    def config_from_hf(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields."""
        return super().config_from_hf(hf) | expert_fields(hf, is_sparse(hf), normalizes=self.normalizes(hf))

    def ffn_size(self, hf: PretrainedConfig) -> int:
        """Return the width inside the MLPs of layers without experts, 0 if there are none."""
        return 0 if all(is_sparse(hf)) else int(hf.intermediate_size)

    def expert_dims(self, hf: PretrainedConfig) -> dict[str, int]:
        """Return the fields of ModelDims about mixtures of experts."""
        return {"num_experts": int(hf.num_experts), "expert_ffn_hidden_size": int(hf.moe_intermediate_size)}

    def layer_weights(self, hf: PretrainedConfig) -> int:
        """Return the number of weights that a token meets: attention, router, the chosen experts or an MLP."""
        h, num_sparse = hf.hidden_size, sum(is_sparse(hf))
        attention = h * head_dim(hf) * (2 * hf.num_attention_heads + 2 * hf.num_key_value_heads)
        experts = h * hf.num_experts + hf.num_experts_per_tok * 3 * h * hf.moe_intermediate_size
        dense = (hf.num_hidden_layers - num_sparse) * 3 * h * hf.intermediate_size
        return int(hf.num_hidden_layers * attention + num_sparse * experts + dense)

    def inactive_weights(self, hf: PretrainedConfig) -> int:
        """Return the number of weights of the experts that are not chosen for a token."""
        others = hf.num_experts - hf.num_experts_per_tok
        return int(sum(is_sparse(hf)) * others * 3 * hf.hidden_size * hf.moe_intermediate_size)

    def weight_entries(self, hf: PretrainedConfig, names: TextNames) -> list[Entry]:
        """Return the entries of all layers.

        Raises:
            ConversionError: fused experts in files that may be stored either way.
        """
        layers = list(enumerate(is_sparse(hf)))
        sparse, dense = [i for i, x in layers if x], [i for i, x in layers if not x]
        form = expert_form(names, sparse[0], expert_sizes(hf), usual=self.usual_form)
        mlp = mlp_entries(names)
        attention = [x for x in projection_entries(hf, names) if x not in mlp]
        everywhere = [*norm_entries(names), *head_norm_entries(names), *attention]
        return [
            *(x for entry in everywhere for x in entry.expand(layer=range(hf.num_hidden_layers))),
            *(x for entry in mlp for x in entry.expand(layer=dense)),
            *(x for entry in expert_entries(names, expert_sizes(hf), form) for x in entry.expand(layer=sparse)),
        ]


class Qwen3VlMoeText(Qwen3Moe):
    """The decoder of Qwen3-VL with experts: interleaved M-RoPE, and features of the tower's inner layers."""

    model_types = ("qwen3_vl_moe_text",)
    part_of_a_class = True
    usual_form = ExpertForm.TRANSPOSED

    def normalizes(self, hf: PretrainedConfig) -> bool:
        """Return whether the weights of the chosen experts add up to 1, which they always do here."""
        return True

    def shape(self, hf: PretrainedConfig) -> DecoderShape:
        """Return what TransformerConfig does not say."""
        rope = mrope_from_hf(hf, Qwen3VLMoeTextRotaryEmbedding)
        return replace(super().shape(hf), rope=rope, deepstack=True)
