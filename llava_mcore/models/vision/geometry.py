"""What a vision tower's Hugging Face config says about pictures; models, data and builds agree on it here."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PretrainedConfig

from llava_mcore.errors import ConversionError

TOKENS_BEFORE_PATCHES: dict[str, Callable[[PretrainedConfig], int]] = {
    "clip_vision_model": lambda vision: 1,
    "siglip_vision_model": lambda vision: 0,
    "dinov2": lambda vision: 1,
    "dinov2_with_registers": lambda vision: 1 + int(vision.num_register_tokens),
    "internvl_vision": lambda vision: 1,
}
"""By model_type: the class token and registers that stand before a picture's patches."""

WRAPPED = ("clip_vision_model", "siglip_vision_model")
"""Towers whose tensors have `vision_model.` in their names in llava-hf's checkpoints.

transformers since 5.6 writes them without, but reads both; vLLM's LLaVA loader (0.33) knows only the name with it."""


def image_side(vision: PretrainedConfig) -> int:
    """Return the height and width, in pixels, of the pictures that the tower takes."""
    return _side(vision.image_size, "image_size")


def patch_side(vision: PretrainedConfig) -> int:
    """Return the height and width of a patch in pixels."""
    return _side(vision.patch_size, "patch_size")


def num_patches(vision: PretrainedConfig) -> int:
    """Return the patches of a picture; what remains at its right and lower edge is ignored."""
    return (image_side(vision) // patch_side(vision)) ** 2


def num_positions(vision: PretrainedConfig) -> int:
    """Return the features of a picture, class token and registers included. KeyError for an unknown tower."""
    return num_patches(vision) + TOKENS_BEFORE_PATCHES[vision.model_type](vision)


def tokens_per_image(hf: PretrainedConfig) -> int:
    """Return the language-model positions of a picture: the features that Hugging Face's LLaVA makes of it.

    Patches, plus the class token and registers if the tower has them, minus the first feature under the strategy
    "default" (which drops patch 0 of a tower without class token).

    Raises:
        ConversionError: a tower that is not known.
    """
    vision = hf.vision_config
    if vision.model_type not in TOKENS_BEFORE_PATCHES:
        raise ConversionError(
            f"vision tower {vision.model_type!r} is not known; known are {sorted(TOKENS_BEFORE_PATCHES)}"
        )
    return num_positions(vision) - int(hf.vision_feature_select_strategy == "default")


def has_class_token(vision: PretrainedConfig) -> bool:
    """Tell whether a token for the whole picture stands before its patches; of a tower that is known."""
    return vision.model_type in TOKENS_BEFORE_PATCHES and TOKENS_BEFORE_PATCHES[vision.model_type](vision) > 0


def ffn_size(vision: PretrainedConfig) -> int:
    """Return the width inside the tower's MLPs; where they are gated, of the gate alone."""
    if not vision.model_type.startswith("dinov2"):
        return int(vision.intermediate_size)
    width = int(vision.hidden_size * vision.mlp_ratio)
    # DINOv2's rule: two thirds, so that three matrices weigh as much as two, rounded up to a multiple of 8.
    return (int(width * 2 / 3) + 7) // 8 * 8 if vision.use_swiglu_ffn else width


def _side(value: object, key: str) -> int:
    """Read a number, or the two equal ones that some families write.

    Raises:
        ConversionError: height and width differ.
    """
    sides = list(value) if isinstance(value, list | tuple) else [value]
    if len(set(sides)) != 1 or not isinstance(sides[0], int):
        raise ConversionError(f"vision_config.{key} = {value}: only square pictures and patches are supported")
    return sides[0]
