"""The errors a user can cause. Each message says where, what was found, what is allowed and what to do."""

from __future__ import annotations

from collections.abc import Iterable


HUNG = 124
"""Exit code of a process that hung and was ended by its watchdog, as that of timeout(1)."""


class LlavaMcoreError(Exception):
    """Base of all errors that are reported as one message, without a traceback.

    `on_all_ranks`: every rank raises this very message, so one of them may report it for all.
    `exit_code`: that of a process that ends with it.
    """

    exit_code = 2

    def __init__(self, message: str, *, on_all_ranks: bool = False) -> None:
        super().__init__(message)
        self.on_all_ranks = on_all_ranks


class ConfigError(LlavaMcoreError):
    """The run's configuration, a flag or a layout cannot work."""


class ConversionError(LlavaMcoreError):
    """A Hugging Face folder, the mapping table and the model do not agree."""


class DataError(LlavaMcoreError):
    """A dataset, a sample, a tokenizer or an image processor cannot be used."""


class CheckpointError(LlavaMcoreError):
    """A Megatron checkpoint cannot be read, written or resumed from."""


class TrainingError(LlavaMcoreError):
    """Training itself went wrong: numbers that are not finite, or no memory left on a GPU."""

    exit_code = 3


def problems(title: str, found: Iterable[str]) -> str:
    """Return one message that lists every problem, one indented line each."""
    lines = [f"  - {line}".replace("\n", "\n    ") for line in found]
    return "\n".join([f"{title} ({len(lines)} problem{'s' if len(lines) != 1 else ''}):", *lines])
