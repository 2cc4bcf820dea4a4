"""Language model + projector + vision tower = LlavaForConditionalGeneration, without a second copy of weights."""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import LlavaConfig, LlavaForConditionalGeneration, PreTrainedModel

from llava_mcore.build.language import TokenIds, settle_ids
from llava_mcore.build.vision import FeaturePlan


def llava_config(language: PreTrainedModel, vision: PreTrainedModel, plan: FeaturePlan, ids: TokenIds) -> LlavaConfig:
    """Return the configuration of the whole. The language model's own is changed in place: it becomes part of it."""
    settle_ids(language.config, ids)
    for part in (language.config, vision.config):
        part.name_or_path = ""  # would be a path of this machine
    # transformers ties by the top-level value, Megatron and older readers look into text_config: both must say it.
    tied = language.config.tie_word_embeddings
    config = LlavaConfig(
        text_config=language.config,
        vision_config=vision.config,
        image_token_index=ids.image,
        image_seq_length=plan.tokens,
        vision_feature_layer=plan.config_value,
        vision_feature_select_strategy=plan.strategy,
        tie_word_embeddings=tied,
    )
    settle_ids(config, ids)
    return config


def compose(
    language: PreTrainedModel, vision: PreTrainedModel, config: LlavaConfig, *, seed: int
) -> LlavaForConditionalGeneration:
    """Return the whole model. Its language and vision parameters are those of the arguments, not copies."""
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(config)
    model.model.language_model = language.model
    model.lm_head = language.lm_head
    model.model.vision_tower = vision
    projector = model.model.multi_modal_projector.to_empty(device="cpu")
    init_projector(projector, seed)
    projector.to(language.dtype)
    assert not any(p.is_meta for p in model.parameters())
    return model.eval()


def init_projector(projector: nn.Module, seed: int) -> None:
    """Fill the projector's linears, in place and the same on every machine: uniform ±1/√inputs, biases zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for linear in (module for module in projector.modules() if isinstance(module, nn.Linear)):
            bound = 1 / math.sqrt(linear.in_features)
            linear.weight.uniform_(-bound, bound, generator=generator)
            if linear.bias is not None:
                linear.bias.zero_()
