"""Decoder layers that `build --expand-layers` has inserted: config.json lists them."""

from __future__ import annotations

from transformers import PretrainedConfig

from llava_mcore.errors import ConfigError

EXPANDED = "expanded_layers"
"""Key of config.json."""


def expanded_layers(hf: PretrainedConfig) -> list[int]:
    """Return the numbers of the inserted layers; none if there are none."""
    return [int(x) for x in hf.to_dict().get(EXPANDED) or ()]


def prefixes_of_expanded(hf: PretrainedConfig) -> tuple[str, ...]:
    """Return how the Megatron names of their parameters begin. Raises ConfigError if there are none."""
    layers = expanded_layers(hf)
    if not layers:
        raise ConfigError(
            f"--train-expanded: config.json has no {EXPANDED}: insert layers with build --model DIR --expand-layers "
            "…, or omit the flag"
        )
    return tuple(f"language_model.decoder.layers.{i}." for i in layers)
