"""Checks that a model does itself, whoever builds or calls it: its values would differ from Hugging Face's."""

from __future__ import annotations

from llava_mcore.config.rules.parallel import check_deepstack
from llava_mcore.errors import ConfigError


def require_deepstack_layers(num_deepstack: int, num_layers: int) -> None:
    """Raise ConfigError if the tower's inner features belong to layers of a later stage, which would not get them.

    Args:
        num_layers: decoder layers beside the tower.
    """
    advice = "use fewer stages, or give the first one more layers (Stages.first)"
    problems = check_deepstack(num_deepstack, num_layers, "this model", "a stage without all of them", advice)
    if problems:
        raise ConfigError(problems[0])


def require_within(window: int | None, length: int | None) -> None:
    """Raise ConfigError for a sequence in which some tokens would see more than in Hugging Face's model.

    Args:
        window: a sliding window that is not computed (see `limiting_window`).
        length: of the longest sequence; None: unknown.
    """
    if window is not None and length is not None and length > window:
        raise ConfigError(
            f"a sequence of {length} tokens exceeds the sliding attention window of {window} of this model, which is "
            "not supported yet: shorten it"
        )
