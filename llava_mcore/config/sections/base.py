"""Base class and number types of the configuration's sections."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

UserPath = Annotated[Path, AfterValidator(Path.expanduser)]

Iterations = Annotated[int, Field(ge=1, le=10**9)]
"""A number of iterations."""
Samples = Annotated[int, Field(ge=1, le=10**15)]
"""A number of samples of a whole run or of a part of it."""
Size = Annotated[int, Field(ge=1, le=10**7)]
"""A length or a batch size: a product of three of them still fits into 64 bits."""
Parts = Annotated[int, Field(ge=1, le=10**5)]
"""A number of processes, machines or layers."""
Seconds = Annotated[int, Field(ge=1, le=10**7)]
"""A time limit, up to a few months."""


def comma_separated(value: Any) -> Any:
    """Return the parts of a text with commas; a list stays as it is."""
    return value.split(",") if isinstance(value, str) else value


class Section(BaseModel):
    """Base of all sections."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _one_line(cls, value: Any) -> Any:
        """Values are used in job scripts, command lines, environments and messages, where a line break has no
        meaning."""
        for text in value if isinstance(value, list | tuple) else (value,):
            if not isinstance(text, str | Path):
                continue
            for character in str(text):
                kind = unicodedata.category(character)
                if kind == "Cs":  # a byte that Python could not decode
                    raise ValueError(
                        "expected UTF-8; rename it, or set LC_ALL=C.UTF-8 if the name is UTF-8 and the locale is not"
                    )
                if kind == "Cc":
                    raise ValueError(f"expected a line of text without control characters such as {character!r}")
        return value
