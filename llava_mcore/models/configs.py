"""megatron-core's TransformerConfig of each part, from Hugging Face's config and the layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import LlavaConfig

from llava_mcore.models.parts import language_part, vision_part
from llava_mcore.models.projection import mlp
from llava_mcore.models.vision.features import feature_choice


@dataclass(frozen=True)
class ModelOptions:
    """What decides how a model is built, beside its Hugging Face config.

    `initialise` False leaves the weights as allocated: they are about to be loaded. `on_cpu` allocates nothing on a
    GPU even where there is one.
    """

    params_dtype: torch.dtype = torch.float32
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    make_vocab_size_divisible_by: int = 128
    initialise: bool = True
    deterministic: bool = False
    on_cpu: bool = False


@dataclass(frozen=True)
class PartConfigs:
    """One TransformerConfig a part."""

    language: TransformerConfig
    vision: TransformerConfig
    projection: TransformerConfig


def part_configs(hf: LlavaConfig, options: ModelOptions) -> PartConfigs:
    """Derive the three configurations. Only the language model is pipelined: the tower sits on stage 0."""
    common = _common_fields(options)
    pipeline = {
        "pipeline_model_parallel_size": options.pipeline_model_parallel_size,
        "pipeline_dtype": options.params_dtype,
        "batch_p2p_comm": True,
        "deallocate_pipeline_outputs": True,
    }
    projection = mlp.config_from_hf(hf) | {"num_attention_heads": options.tensor_model_parallel_size}
    vision = vision_part(hf).config_from_hf(hf.vision_config, feature_choice(hf).num_layers)
    return PartConfigs(
        language=TransformerConfig(**common, **pipeline, **language_part(hf).config_from_hf(hf.text_config)),
        vision=TransformerConfig(**common, **vision),
        projection=TransformerConfig(**common, **projection),
    )


def _common_fields(options: ModelOptions) -> dict[str, Any]:
    dtype = options.params_dtype
    return {
        "tensor_model_parallel_size": options.tensor_model_parallel_size,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "perform_initialization": options.initialise,
        "use_cpu_initialization": options.on_cpu or not torch.cuda.is_available(),
        "deterministic_mode": options.deterministic,
        # The loss is summed over trained tokens and divided by their number once, over all micro-batches and ranks.
        "calculate_per_token_loss": True,
        # Fusions need Apex or Transformer Engine kernels, and change the last bits.
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }
