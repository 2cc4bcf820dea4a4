"""Base class, number types and metadata of the configuration's sections."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

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


@dataclass(frozen=True)
class Flag:
    """Command-line flag of a field, as metadata of its type: `r: Annotated[Rank | None, Flag("--lora-r")] = None`.

    The field's docstring is the flag's help.
    """

    name: str
    aliases: tuple[str, ...] = ()
    group: str = ""
    """Heading in --help and docs/flags.md, one of `GROUPS`; empty: the section's."""
    after: str = ""
    """Flag after which this one and the section's next ones are listed; empty: after the section's previous flag."""
    value: str | None = None
    """Value that the flag sets, if the field is not a switch itself."""
    many: bool = False
    """Takes several values, separated by spaces or commas."""
    alone: str | None = None
    """Value of the flag where none is written after it; only for a choice."""


class Needs:
    """Keys that a field has no effect without, as metadata of its type: `Annotated[bool, Needs("training.fp8")]`.

    It is enough if one of the keys is set (switched on, or not empty). With `value`, `at_least` or `other_than`, the
    key's value must be equal to it, at least as large, or different. `words` replace the text that says so.
    `idle`: values of the field itself that ask for nothing.
    """

    def __init__(
        self,
        *keys: str,
        value: str | None = None,
        at_least: int | None = None,
        other_than: str | None = None,
        words: str | None = None,
        idle: tuple[str, ...] = (),
    ) -> None:
        self.keys = keys
        self.value = value
        self.at_least = at_least
        self.other_than = other_than
        self.words = words
        self.idle = idle

    def accepts(self, current: Any) -> bool:
        """Return whether the value of a key is enough."""
        if self.value is not None:
            return bool(current == self.value)
        if self.at_least is not None:
            return bool(current >= self.at_least)
        return bool(current != self.other_than) if self.other_than is not None else bool(current)


class Section(BaseModel):
    """Base of all sections."""

    flag_group: ClassVar[str] = ""
    """Heading of the section's flags in --help and docs/flags.md, one of `GROUPS`."""

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
