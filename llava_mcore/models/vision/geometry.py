"""The image size in a vision tower's Hugging Face config."""

from __future__ import annotations

from transformers import PretrainedConfig

from llava_mcore.errors import ConversionError


def image_side(vision: PretrainedConfig) -> int:
    """Return the height and width in pixels of the tower's images."""
    return _side(vision.image_size, "image_size")


def patch_side(vision: PretrainedConfig) -> int:
    """Return the height and width of a patch in pixels."""
    return _side(vision.patch_size, "patch_size")


def num_patches(vision: PretrainedConfig) -> int:
    """Return the patches of an image; the rest at its right and lower edge is ignored."""
    return (image_side(vision) // patch_side(vision)) ** 2


def _side(value: object, key: str) -> int:
    """Read a number, or two equal ones, as some families have.

    Raises:
        ConversionError: height and width differ.
    """
    sides = list(value) if isinstance(value, list | tuple) else [value]
    if len(set(sides)) != 1 or not isinstance(sides[0], int):
        raise ConversionError(f"vision_config.{key} = {value}: only square images and patches are supported")
    return sides[0]
