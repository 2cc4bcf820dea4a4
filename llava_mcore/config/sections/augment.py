"""Configuration of one transform of `data.augment`: its name, and the arguments that it is constructed with."""

from __future__ import annotations

import math
from typing import Any

from pydantic import ConfigDict, Field, model_validator

from llava_mcore.config.documents import parse_yaml
from llava_mcore.config.sections.base import Section

EXAMPLE = "{name: ColorJitter, brightness: 0.2}"
_EXPECTED = f"expected a list such as [{EXAMPLE}]"


class TransformConfig(Section):
    """A transform of images. All keys but its name are arguments, which are checked where torchvision is."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(max_length=100)
    """Name of the class in torchvision.transforms.v2."""

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, values: Any) -> Any:
        """Refuse what is not a mapping of names to numbers, texts and lists of these."""
        if not isinstance(values, dict):
            raise ValueError(f"expected a mapping such as {EXAMPLE}")
        wrong = [key for key in values if not isinstance(key, str) or not key.isidentifier()]
        if wrong:
            raise ValueError(f"{wrong[0]!r:.80} cannot be the name of an argument")
        return {key: _as_plain(key, value) for key, value in values.items()}

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name."""
        return dict(self.model_extra or {})


def transform_list(value: Any) -> Any:
    """Return the list that a text on the command line means; None is an empty one."""
    if isinstance(value, str):
        try:
            value = parse_yaml(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{_EXPECTED}, in quotes on the command line: {error}") from error
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise ValueError(_EXPECTED)
    return value


def _as_plain(key: str, value: Any) -> Any:
    """Return an argument with its lists as tuples, so that configurations are equal if their values are."""
    if isinstance(value, list | tuple):
        return tuple(_as_plain(key, item) for item in value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key} must be finite")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{key} must be a number, a text, or a list of these, found a {type(value).__name__}")
