"""The vision tower: its weights, the choice of hidden states, and its image processor."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from transformers import MODEL_MAPPING, AutoConfig, AutoImageProcessor, PreTrainedConfig, PreTrainedModel

from llava_mcore.build.options import BuildOptions
from llava_mcore.build.sources import ModelSource, check_loaded, reading, require_clear_weights
from llava_mcore.errors import ConfigError, ConversionError
from llava_mcore.models.vision.families.registry import VISION_FAMILIES, tile_tower, towers_of_any_class
from llava_mcore.models.vision.features import image_side, num_patches, patch_side

PAIRS = tuple(family.pair for family in dict.fromkeys(VISION_FAMILIES.values()) if family.pair is not None)
"""Models with a text encoder, of which only the tower is used."""


@dataclass(frozen=True)
class FeatureShape:
    """The part of the tower's output that the projector reads.

    `layers`: indices into its hidden states. `class_tokens`: positions before the patches, with registers. `tokens`:
    positions that the tower outputs per image or tile. `input_width`: features per position, of all layers together.
    """

    layers: tuple[int, ...]
    strategy: Literal["default", "full"]
    class_tokens: int
    tokens: int
    input_width: int

    @property
    def config_value(self) -> int | list[int]:
        """`vision_feature_layer` as LlavaConfig spells it."""
        return self.layers[0] if len(self.layers) == 1 else list(self.layers)


def load_vision_config(source: ModelSource) -> PreTrainedConfig:
    """Read the tower's configuration, even from a folder that also has a text encoder.

    Raises:
        ConversionError: it is unreadable, or of an unsupported family, or its weights are ambiguous.
    """
    require_clear_weights(source)
    with reading("the vision model's configuration", source):
        config = AutoConfig.from_pretrained(source.name, **source.load_arguments)
    if config.model_type in PAIRS:
        return config.vision_config
    if config.model_type not in towers_of_any_class():
        known = ", ".join([*PAIRS, *towers_of_any_class()])
        naflex = (
            " (NaFlex; take a fixed-resolution SigLIP 2, which is a siglip)" if "siglip2" in config.model_type else ""
        )
        raise ConversionError(
            f"{source}: model_type is {config.model_type!r}{naflex}; supported vision models: {known}"
        )
    return config


def load_vision_tower(source: ModelSource, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Read the tower's weights. Its positions are interpolated to images of the size in `config` (see `resized`).

    Raises:
        ConversionError: it is unreadable, or weights are missing.
    """
    with reading("the vision model", source):
        tower_class = MODEL_MAPPING[type(config)]
        tower, info = tower_class.from_pretrained(source.name, dtype=dtype, output_loading_info=True)
    check_loaded(source, "vision model", set(info["missing_keys"]))
    if image_side(tower.config) != image_side(config):
        _interpolate_positions(tower, config)
    return tower


def _interpolate_positions(tower: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Replace the position embeddings with those that transformers interpolates for images of the size in
    `config`."""
    family, side, embeddings = tile_tower(config), image_side(config), tower.embeddings
    # Registers get no position: transformers inserts them afterwards. Only the shape is read.
    patches = torch.empty(1, int(family.has_class_token(config)) + num_patches(config), config.hidden_size)
    with torch.no_grad():
        positions = embeddings.interpolate_pos_encoding(patches, side, side)
    if positions.shape != patches.shape:
        raise ConversionError(
            f"transformers interpolates the positions of {config.model_type} to {tuple(positions.shape)}, expected "
            f"{tuple(patches.shape)}: this version of transformers cannot be used for images of {side} px"
        )
    if family.interpolates:
        embeddings.position_embeddings = nn.Parameter(positions.clone())
    else:  # CLIP and SigLIP keep them in a layer
        embeddings.position_embedding = nn.Embedding.from_pretrained(positions[0].clone(), freeze=False)
    tower.config.image_size = config.image_size


def plan_features(config: PreTrainedConfig, options: BuildOptions, layers: tuple[int, ...]) -> FeatureShape:
    """Decide which hidden states are used and the number of positions of an image.

    Args:
        layers: the class's default layers.

    Raises:
        ConfigError: a layer the tower does not have, or a strategy that would drop a patch.
    """
    family = tile_tower(config)
    before = family.tokens_before_patches(config)
    has_class_token = before > 0
    strategy = options.vision_feature_select_strategy or ("default" if has_class_token else "full")
    if strategy == "default" and not has_class_token:
        raise ConfigError(
            "--vision-feature-select-strategy default drops the tower's first position, which is a patch: "
            "a SigLIP tower has no class token. Use full."
        )
    asked_for = layers if options.vision_feature_layers is None else options.vision_feature_layers
    layers = _feature_layers(config.num_hidden_layers, asked_for, expand=options.expand_projector)
    tokens = family.num_positions(config) - int(strategy == "default")
    return FeatureShape(layers, strategy, before, tokens, config.hidden_size * len(layers))


def _feature_layers(num_layers: int, layers: tuple[int, ...], *, expand: bool) -> tuple[int, ...]:
    """Return the requested layers; --expand-projector adds the one half as deep."""
    states = num_layers + 1
    if not layers or not all(-states <= layer < states for layer in layers):
        raise ConfigError(
            f"--vision-feature-layer {' '.join(map(str, layers))}: this tower has hidden states 0 (the embedding) to "
            f"{num_layers}, or -{states} to -1"
        )
    if not expand:
        return layers
    if len(layers) > 1:
        raise ConfigError("--expand-projector adds a second layer by itself: give only one --vision-feature-layer")
    depth = layers[0] % states
    if depth < 2:
        raise ConfigError(f"--expand-projector: no layer is halfway to --vision-feature-layer {layers[0]}")
    half = depth // 2
    return (layers[0], half if layers[0] >= 0 else half - states)


def asked_size(config: PreTrainedConfig, size: int | None, positions: int | None) -> PreTrainedConfig:
    """Return the tower's configuration for images of --image-size; unchanged if that is not given.

    Args:
        positions: number of positions of the language model; None: an image takes the same number at any size.

    Raises:
        ConfigError: the size is not a multiple of the tower's patches, or too large for the positions.
    """
    if size is None or size == image_side(config):
        return config
    patch = patch_side(config)
    if size < 1 or size % patch:
        below = size // patch * patch
        nearest = f"the nearest are {below} and {below + patch}" if below > 0 else f"the smallest is {patch}"
        raise ConfigError(f"--image-size {size}: expected a multiple of the tower's patches of {patch} px; {nearest}")
    resized_config = resized(config, size)
    tokens = tile_tower(config).num_positions(resized_config)
    if positions is not None and tokens >= positions:
        raise ConfigError(
            f"--image-size {size}: an image would take {tokens:,} tokens, but the language model has {positions:,} "
            "positions (max_position_embeddings); take a smaller size"
        )
    return resized_config


def resized(config: PreTrainedConfig, side: int) -> PreTrainedConfig:
    """Return the tower's configuration for images of `side` pixels; unchanged if that is its size."""
    if side == image_side(config):
        return config
    result = copy.deepcopy(config)
    result.image_size = side if isinstance(config.image_size, int) else [side, side]
    return result


def load_image_processor(source: ModelSource, config: PreTrainedConfig, options: BuildOptions) -> tuple[Any, int]:
    """Read the image processor, try it on a non-square image, and return it with the size of its output.

    With --image-size it is set to that size first, and `config` has that size.

    Raises:
        ConversionError: it is unreadable, or its output does not have the tower's size.
    """
    hint = "Give --image-processor TAG_OR_DIR: a folder with preprocessor_config.json."
    size = image_side(config)
    with reading("the image processor", source, hint):
        processor = AutoImageProcessor.from_pretrained(source.name, **source.load_arguments)
        if options.image_size is not None:
            processor = with_size(processor, size)
    picture = np.zeros((size // 2 + 3, size + 5, 3), dtype=np.uint8)
    with reading("an image through the image processor", source):
        shape = tuple(processor(images=picture, return_tensors="pt")["pixel_values"].shape)
    takes_any = options.image_size is None and tile_tower(config).interpolates and shape[-1] >= patch_side(config)
    if shape != (1, 3, size, size) and not (takes_any and shape == (1, 3, shape[-1], shape[-1])):
        raise ConversionError(
            f"{source}: the image processor makes images of shape {shape[1:]}, but the tower takes {(3, size, size)}"
            ". Give the matching one with --image-processor, or have both set with --image-size."
        )
    return processor, shape[-1]


def with_size(processor: Any, side: int) -> Any:
    """Return a copy of the image processor with `size` and `crop_size` set to `side` pixels."""
    values = processor.to_dict()
    for name in ("size", "crop_size"):
        if values.get(name):
            values[name] = {key: side for key, value in values[name].items() if value is not None}
    return type(processor).from_dict(values)
