"""Hugging Face's config.json as transformers understands it, defaults filled in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig

from llava_mcore.config.rules.dims import ModelDims
from llava_mcore.errors import ConversionError, problems
from llava_mcore.files.hf_files import read_config
from llava_mcore.models.architectures.registry import ARCHITECTURES, architecture_of, tower_config
from llava_mcore.models.language.families.registry import REASONS as LANGUAGE_REASONS
from llava_mcore.models.language.families.registry import language_family, limiting_window, texts_of_any_class
from llava_mcore.models.vision.families.base import PatchTower, TileTower
from llava_mcore.models.vision.families.registry import REASONS as VISION_REASONS
from llava_mcore.models.vision.families.registry import towers_of_any_class, vision_family

_LARGEST = {
    "num_hidden_layers": 2_000,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "head_dim": 1 << 16,
    "vocab_size": 1 << 26,
    "max_position_embeddings": 1 << 32,
    "image_size": 1 << 15,
    "patch_size": 1 << 15,
    "num_channels": 1 << 10,
    "depth": 2_000,
    "num_heads": 1 << 16,
    "embed_dim": 1 << 20,
    "in_channels": 1 << 10,
    "spatial_merge_size": 1 << 6,
    "temporal_patch_size": 1 << 6,
    "num_position_embeddings": 1 << 24,
    "out_hidden_size": 1 << 20,
    "d_model": 1 << 20,
    "encoder_layers": 2_000,
    "encoder_attention_heads": 1 << 16,
    "encoder_ffn_dim": 1 << 24,
    "num_mel_bins": 1 << 12,
    "max_source_positions": 1 << 20,
    "window_size": 1 << 15,
    "linear_conv_kernel_dim": 1 << 6,
    "linear_key_head_dim": 1 << 16,
    "linear_value_head_dim": 1 << 16,
    "linear_num_key_heads": 1 << 16,
    "linear_num_value_heads": 1 << 16,
    "num_experts": 1 << 16,
    "num_local_experts": 1 << 16,
    "num_experts_per_tok": 1 << 16,
    "decoder_sparse_step": 2_000,
    "moe_intermediate_size": 1 << 24,
    "shared_expert_intermediate_size": 1 << 24,
    "resampler_n_latents": 1 << 16,
    "resampler_depth": 2_000,
    "resampler_n_heads": 1 << 16,
    "resampler_head_dim": 1 << 16,
}
"""Far beyond every existing model."""


VALUE_ERRORS = (KeyError, ValueError, TypeError, AttributeError, ArithmeticError, IndexError)
"""Errors that a value of a strange type or size raises where it is used."""


def load_hf_config(folder: Path) -> PretrainedConfig:
    """Read `folder`/config.json.

    Raises:
        ConversionError: there is no config.json, it is not JSON, or the architecture or a family is unknown.
    """
    path = folder / "config.json"
    values = read_config(folder)
    # The class of the whole model decides which config class reads the rest.
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        known = ", ".join(f"{name!r} ({x.model_class.__name__})" for name, x in ARCHITECTURES.items())
        raise ConversionError(
            f"{path}: model_type is {kind!r}, expected one of {known}; build one from a text model with "
            "`python -m llava_mcore build`"
        )
    try:
        hf = ARCHITECTURES[kind].config_class.from_dict(deepcopy(values))  # it takes values out of them
    except (*VALUE_ERRORS, StrictDataclassError) as error:
        raise ConversionError(f"{path}: transformers cannot read it ({error!r})") from error
    # Values that transformers accepts, but with which later code would fail without a helpful message.
    wrong = [x for section in hf.sub_configs for x in _wrong_sizes(section, getattr(hf, section))]
    wrong += _wrong_rope("text_config.rope_parameters", hf.text_config.to_dict().get("rope_parameters"))
    if wrong:
        raise ConversionError(problems(f"{path}: invalid values", wrong))
    # Families, and values of their parts, that this package does not have.
    unknown = _unknown_families(hf, values)
    if unknown:
        raise ConversionError(problems(str(path), unknown))
    unusable = _unusable_parts(hf)
    if unusable:
        title = f"{path} has values that cannot be used: correct them, or take config.json from the original model"
        raise ConversionError(problems(title, unusable))
    return hf


def _unusable_parts(hf: PretrainedConfig) -> list[str]:
    """Return a line for each part that cannot be described, because a value has a strange type or size.

    Well-formed but unsupported values are refused where they are needed, because transformers may still run them.
    """
    architecture, text, tower = architecture_of(hf), hf.text_config, tower_config(hf)
    family = vision_family(tower)
    parts: dict[str, Callable[[], object]] = {
        "text_config": lambda: (language_family(text).config_from_hf(text), language_family(text).shape(text)),
        architecture.tower_section: lambda: (
            family.config_from_hf(tower, family.num_layers(tower)),
            family.shape(tower) if isinstance(family, TileTower | PatchTower) else None,
        ),
        "the connector": lambda: architecture.connector(hf).config_from_hf(hf),
    }
    errors = []
    for name, describe in parts.items():
        try:
            describe()
        except ConversionError:
            continue
        except VALUE_ERRORS as error:
            errors.append(f"in {name}: {error!r}")
    return errors


def _unknown_families(hf: PretrainedConfig, values: dict[str, Any]) -> list[str]:
    """Return problems with the families of the parts. `values`: those of config.json."""
    errors = []
    architecture = architecture_of(hf)
    towers, texts = architecture.towers or towers_of_any_class(), architecture.texts or texts_of_any_class()
    for key, kind, known, reasons in (
        ("text_config", str(hf.text_config.model_type), texts, LANGUAGE_REASONS),
        (architecture.tower_section, _tower_type(hf, values), towers, VISION_REASONS),
    ):
        if kind not in known:
            reason = f": {reasons[kind]}" if kind in reasons else ""
            errors.append(f"{key}.model_type = {kind!r} is not supported{reason}; known: {', '.join(sorted(known))}")
    return errors


def _tower_type(hf: PretrainedConfig, values: dict[str, Any]) -> str:
    """Return the tower's model_type. transformers 5.23 ignores that of the file where a class has one type of tower."""
    section = values.get(architecture_of(hf).tower_section)
    written = section.get("model_type") if isinstance(section, dict) else None
    return str(written if written in towers_of_any_class() else tower_config(hf).model_type)


def _wrong_rope(key: str, value: Any) -> Iterator[str]:
    """Yield problems with strings where numbers are expected."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _wrong_rope(f"{key}.{name}", item)
    elif isinstance(value, str) and not key.endswith("type"):
        yield f"{key} is {value!r}, expected a number"


def _wrong_sizes(section: str, config: PretrainedConfig) -> Iterator[str]:
    """Yield sizes that are invalid, or so large that building the model would not end."""
    values = config.to_dict()
    for key, largest in _LARGEST.items():
        for value in values[key] if isinstance(values.get(key), list | tuple) else [values.get(key)]:
            is_size = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= largest
            if key in values and value is not None and not is_size:
                yield f"{section}.{key} is {value!r}, expected a whole number from 1 to {largest:,}"


def model_dims(hf: PretrainedConfig) -> ModelDims:
    """Return the sizes that determine the possible layouts."""
    text, vision = hf.text_config, tower_config(hf)
    tower, features = vision_family(vision), architecture_of(hf).features(hf)
    return ModelDims(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        ffn_hidden_size=language_family(text).ffn_size(text),
        num_attention_heads=text.num_attention_heads,
        num_query_groups=text.num_key_value_heads,
        vocab_size=text.vocab_size,
        vision_num_layers=tower.num_layers(vision),
        vision_hidden_size=tower.hidden_size(vision),
        vision_ffn_hidden_size=tower.padded_ffn_size(vision),
        vision_num_attention_heads=vision.num_attention_heads,
        max_position_embeddings=text.max_position_embeddings,
        sliding_window=limiting_window(text),
        num_deepstack=architecture_of(hf).num_deepstack(hf),
        keeps_class_token=tower.has_class_token(vision) and not features.drop_first_token,
        projection_ffn_hidden_size=architecture_of(hf).connector(hf).config_from_hf(hf)["ffn_hidden_size"],
        num_cross_layers=len(language_family(text).shape(text).cross_layers),
        **language_family(text).delta_dims(text),
        **language_family(text).expert_dims(text),
    )
