"""Language model + projector + vision tower = a model of the chosen class, without a second copy of weights."""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.idefics2.modeling_idefics2 import Idefics2PerceiverResampler, Idefics2RMSNorm

from llava_mcore.build.architectures.base import FolderClass
from llava_mcore.build.language import TokenIds, settle_ids
from llava_mcore.build.vision import FeatureShape
from llava_mcore.models.architectures.registry import architecture_of

_LATENT_STD = 0.02


def whole_config(
    kind: FolderClass, language: PreTrainedModel, vision: PreTrainedModel, plan: FeatureShape, ids: TokenIds
) -> PretrainedConfig:
    """Return the configuration of the whole model. The language model's is changed in place and becomes part of it."""
    settle_ids(language.config, ids)
    for part in (language.config, vision.config):
        part.name_or_path = ""  # would be a path on this machine
    # transformers reads the top-level value, Megatron and older readers text_config: both must be set.
    config = kind.config(language.config, vision.config, plan, ids)
    settle_ids(config, ids)
    return config


def compose(
    kind: FolderClass, language: PreTrainedModel, vision: PreTrainedModel, config: PretrainedConfig, *, seed: int
) -> PreTrainedModel:
    """Return the whole model. It shares the language and vision parameters of the arguments."""
    with torch.device("meta"):
        model = kind.model_class(config)
    kind.place(model, language, vision)
    projector = kind.projector(model).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    init_projector(projector, generator)
    projector.to(language.dtype)
    if architecture_of(config).has_newline:
        model.model.image_newline = new_newline(config.text_config.hidden_size, language.dtype, generator)
    assert not any(p.is_meta for p in model.parameters())
    return model.eval()


def init_projector(projector: nn.Module, generator: torch.Generator) -> None:
    """Initialize the projector in place, the same way on every machine.

    Linears uniform ±1/√inputs, biases zero, norms one, latents normal with standard deviation 0.02: transformers' class
    starts with equal latents.
    """
    with torch.no_grad():
        for linear in (module for module in projector.modules() if isinstance(module, nn.Linear)):
            bound = 1 / math.sqrt(linear.in_features)
            linear.weight.uniform_(-bound, bound, generator=generator)
            if linear.bias is not None:
                linear.bias.zero_()
    for module in projector.modules():
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, Idefics2RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, Idefics2PerceiverResampler):
            nn.init.normal_(module.latents, std=_LATENT_STD, generator=generator)


def new_newline(width: int, dtype: torch.dtype, generator: torch.Generator) -> nn.Parameter:
    """Return the vector [h] that ends a row of a grid, initialized as in transformers: normal, std 1/√h."""
    return nn.Parameter((torch.randn(width, generator=generator) / math.sqrt(width)).to(dtype))
