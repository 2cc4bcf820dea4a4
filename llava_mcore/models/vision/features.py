"""Sizes of images, and the hidden states that are features, as a tower's Hugging Face config gives them.

Hugging Face's rule: hidden_states[0] is the embedding (after CLIP's pre-norm), hidden_states[i] the output of layer
i, before any post-norm; "default" drops the first token of the result, "full" keeps all.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from llava_mcore.errors import ConversionError


@dataclass(frozen=True)
class FeatureChoice:
    """Layers whose outputs are used (0: the embedding), counted from the bottom, and the dropped tokens."""

    layers: tuple[int, ...]
    drop_first_token: bool

    @property
    def num_layers(self) -> int:
        """Number of layers that must run."""
        return max(self.layers)


def feature_choice(hf: PretrainedConfig) -> FeatureChoice:
    """Read `vision_feature_layer` (an int or a list) and `vision_feature_select_strategy`.

    Raises:
        ConversionError: a layer does not exist in the tower, or no layer is given.
    """
    chosen = hf.vision_feature_layer
    requested = [chosen] if isinstance(chosen, int) else list(chosen)
    num_states = hf.vision_config.num_hidden_layers + 1
    layers = tuple(i if i >= 0 else num_states + i for i in requested)
    if not layers or not all(0 <= i < num_states for i in layers):
        raise ConversionError(
            f"vision_feature_layer = {chosen}: the tower has hidden states 0 to {num_states - 1} "
            f"(or -{num_states} to -1)"
        )
    if max(layers) == 0:
        raise ConversionError(f"vision_feature_layer = {chosen}: the tower's embedding alone is not supported")
    return FeatureChoice(layers, hf.vision_feature_select_strategy == "default")


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
