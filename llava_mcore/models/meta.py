"""A model without memory: names, shapes and shard rules of every parameter, for conversions."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from llava_mcore.models.configs import ModelOptions
from llava_mcore.models.multimodal import VisionLanguageModel


def meta_model(hf: PretrainedConfig, *, num_vocab_rows: int) -> VisionLanguageModel:
    """Build the whole model (tp 1, pp 1) on the meta device. Process groups of one process must exist.

    Args:
        num_vocab_rows: rows of the embedding, including padding.
    """
    options = ModelOptions(initialize=False, on_cpu=True, make_vocab_size_divisible_by=num_vocab_rows)
    with torch.device("meta"):
        return VisionLanguageModel(hf, options)
