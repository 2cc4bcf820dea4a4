"""Language model + projector + vision tower = a Hugging Face class, without a second copy of weights."""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from llava_mcore.build.classes import FolderClass
from llava_mcore.build.language import TokenIds, settle_ids
from llava_mcore.build.vision import FeaturePlan
from llava_mcore.models.architectures.registry import architecture_of


def whole_config(
    kind: FolderClass, language: PreTrainedModel, vision: PreTrainedModel, plan: FeaturePlan, ids: TokenIds
) -> PreTrainedConfig:
    """Return the configuration of the whole. The language model's own is changed in place: it becomes part of it."""
    settle_ids(language.config, ids)
    for part in (language.config, vision.config):
        part.name_or_path = ""  # would be a path of this machine
    config = kind.config(language.config, vision.config, plan, ids)
    settle_ids(config, ids)
    return config


def compose(
    language: PreTrainedModel, vision: PreTrainedModel, config: PreTrainedConfig, *, seed: int
) -> PreTrainedModel:
    """Return the whole model. Its language and vision parameters are those of the arguments, not copies."""
    architecture, generator = architecture_of(config), torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        model = architecture.model_class(config)
    model.model.language_model = language.model
    model.lm_head = language.lm_head
    model.model.vision_tower = vision
    projector = model.model.multi_modal_projector.to_empty(device="cpu")
    init_projector(projector, generator)
    projector.to(language.dtype)
    if architecture.has_newline:
        model.model.image_newline = new_newline(config.text_config.hidden_size, language.dtype, generator)
    assert not any(p.is_meta for p in model.parameters())
    return model.eval()


def init_projector(projector: nn.Module, generator: torch.Generator) -> None:
    """Fill the projector's linears, in place and the same on every machine: uniform ±1/√inputs, biases zero."""
    with torch.no_grad():
        for linear in (module for module in projector.modules() if isinstance(module, nn.Linear)):
            bound = 1 / math.sqrt(linear.in_features)
            linear.weight.uniform_(-bound, bound, generator=generator)
            if linear.bias is not None:
                linear.bias.zero_()


def new_newline(width: int, dtype: torch.dtype, generator: torch.Generator) -> nn.Parameter:
    """Return the vector [h] that ends a row of a grid, as transformers begins it: normal, 1/√h."""
    return nn.Parameter((torch.randn(width, generator=generator) / math.sqrt(width)).to(dtype))
