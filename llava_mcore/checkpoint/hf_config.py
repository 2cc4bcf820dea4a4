"""Hugging Face's config.json as transformers understands it, defaults filled in."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import LlavaConfig

from llava_mcore.config.dims import ModelDims
from llava_mcore.errors import ConversionError
from llava_mcore.towers import ffn_size, has_class_token

_WINDOWS_COMPUTED = ("gemma2", "gemma3_text")
"""Families whose sliding windows are computed as they are; others must not meet sequences longer than theirs."""


def load_hf_config(folder: Path) -> LlavaConfig:
    """Read `folder`/config.json.

    Raises:
        ConversionError: no config.json, not JSON, or not of a LLaVA model.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConversionError(
            f"{folder}: no config.json; expected a Hugging Face LLaVA folder (build one with build_llava_jp.py)"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConversionError(f"{path}: not valid JSON ({error})") from error
    kind = values.get("model_type")
    if kind != "llava":
        raise ConversionError(
            f"{path}: model_type is {kind!r}, expected 'llava'; a text model becomes one with build_llava_jp.py"
        )
    try:
        return LlavaConfig.from_dict(values)
    except (KeyError, ValueError, TypeError, StrictDataclassError) as error:
        raise ConversionError(f"{path}: transformers cannot read it ({error!r})") from error


def model_dims(hf: LlavaConfig) -> ModelDims:
    """Return the sizes that decide which layouts are possible."""
    text, vision = hf.text_config, hf.vision_config
    values = text.to_dict()
    limited_by_window = values.get("use_sliding_window", True) and text.model_type not in _WINDOWS_COMPUTED
    return ModelDims(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        ffn_hidden_size=text.intermediate_size,
        num_attention_heads=text.num_attention_heads,
        num_query_groups=text.num_key_value_heads,
        vocab_size=text.vocab_size,
        vision_num_layers=vision.num_hidden_layers,
        vision_hidden_size=vision.hidden_size,
        vision_ffn_hidden_size=ffn_size(vision),
        vision_num_attention_heads=vision.num_attention_heads,
        max_position_embeddings=text.max_position_embeddings,
        sliding_window=values.get("sliding_window") if limited_by_window else None,
        keeps_class_token=has_class_token(vision) and hf.vision_feature_select_strategy != "default",
    )
