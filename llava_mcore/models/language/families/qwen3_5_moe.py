"""Qwen3.5 with experts: the decoder of Qwen3.5 with a mixture in every layer, and an expert that all tokens share.

A gate, a number from 0 to 1 for each token, scales what the shared expert adds.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTextRotaryEmbedding

from llava_mcore.models.language.families.qwen3_5 import Qwen35Text
from llava_mcore.models.language.families.qwen3_moe import expert_fields, expert_sizes
from llava_mcore.weights.expert_files import ExpertForm, expert_entries, expert_form
from llava_mcore.weights.layouts import Concat
from llava_mcore.weights.names import TextNames
from llava_mcore.weights.table import GATED_COLUMN, REPLICATED, ROW, Entry


class Qwen35MoeText(Qwen35Text):
    """The decoder of Qwen3.5 with experts."""

    model_types = ("qwen3_5_moe_text",)
    part_of_a_class = True
    width_key = "shared_expert_intermediate_size"
    rotary = Qwen3_5MoeTextRotaryEmbedding

    def config_from_hf(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields. Raises ConversionError for what is not supported."""
        experts = expert_fields(hf, [True] * hf.num_hidden_layers, normalizes=True)
        shared = {
            "moe_shared_expert_intermediate_size": hf.shared_expert_intermediate_size,
            "moe_shared_expert_gate": True,
        }
        return super().config_from_hf(hf) | experts | shared

    def ffn_size(self, hf: PretrainedConfig) -> int:
        """Return the width inside MLPs, which no layer has."""
        return 0

    def expert_dims(self, hf: PretrainedConfig) -> dict[str, int]:
        """Return the fields of ModelDims about mixtures of experts."""
        return {
            "num_experts": int(hf.num_experts),
            "expert_ffn_hidden_size": int(hf.moe_intermediate_size),
            "shared_ffn_hidden_size": int(hf.shared_expert_intermediate_size),
        }

    def mlp_weights(self, hf: PretrainedConfig) -> int:
        """Return the number of weights that a token meets: router, chosen experts, shared expert and its gate."""
        width = hf.num_experts_per_tok * hf.moe_intermediate_size + hf.shared_expert_intermediate_size
        return int(hf.hidden_size * (hf.num_experts + 3 * width + 1))

    def inactive_weights(self, hf: PretrainedConfig) -> int:
        """Return the number of weights of the experts that are not chosen for a token."""
        others = hf.num_experts - hf.num_experts_per_tok
        return int(hf.num_hidden_layers * others * 3 * hf.hidden_size * hf.moe_intermediate_size)

    def mlp_entries(self, hf: PretrainedConfig, names: TextNames) -> list[Entry]:
        """Return templates of router, experts and shared expert.

        Raises:
            ConversionError: fused experts in files that may be stored either way.
        """
        form = expert_form(names, 0, expert_sizes(hf), usual=ExpertForm.FUSED)
        m, h = names.megatron_layer + "mlp.shared_experts.", names.hf_layer + "mlp.shared_expert"
        gate_up = (f"{h}.gate_proj.weight", f"{h}.up_proj.weight")
        return [
            *expert_entries(names, expert_sizes(hf), form),
            Entry(m + "linear_fc1.weight", gate_up, GATED_COLUMN, Concat(2)),
            Entry(m + "linear_fc2.weight", f"{h}.down_proj.weight", ROW),
            Entry(m + "gate_weight", f"{h}_gate.weight", REPLICATED),
        ]
