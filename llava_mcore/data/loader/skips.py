"""Handling of samples that cannot be used: they are skipped and reported, or the run ends."""

from __future__ import annotations

import tarfile
from typing import Any

from megatron.energon import SourceInfo
from megatron.energon.flavors.webdataset.sample_loader import RawSampleData

from llava_mcore.data.encode.encode import TooLongError
from llava_mcore.data.samples import Skip
from llava_mcore.errors import DataError

MEMORY_ADVICE = (
    "if memory ran out, lower data.num_workers, data.max_waiting_bytes or data.packing_buffer_size, or let large "
    "pictures be skipped (data.max_picture_pixels)"
)
DATA_ERRORS = (OSError, ValueError, KeyError, RecursionError, tarfile.TarError)
"""Errors that energon and its libraries raise for bad data. Anything else is a bug."""


class Skips:
    """Energon's error handler of one stream of samples: collects the samples skipped since the last batch."""

    def __init__(self, *, stop_if_too_long: bool) -> None:
        """stop_if_too_long: a conversation that does not fit ends the run instead of being skipped."""
        self.stop_if_too_long = stop_if_too_long
        self._collected: list[Skip] = []

    def __call__(self, error: Exception, sample: Any, sources: list[SourceInfo] | None) -> None:
        """Record a sample that a step of energon failed on, or raise if the run has to end.

        Args:
            sample: the input of the failing step: raw parts, a sample, or a list of samples.
        """
        skip = Skip(origin_of(sources_of(sample, sources or [])), reason_of(error))
        if not isinstance(error, (*DATA_ERRORS, DataError)) and not isinstance(error.__cause__, DATA_ERRORS):
            raise DataError(str(skip)) from error
        if self.stop_if_too_long and isinstance(error, TooLongError):
            raise DataError(str(skip)) from error
        self._collected.append(skip)

    def note(self, key: str, sources: list[SourceInfo], error: DataError) -> None:
        """Record one conversation of a pack; the others are used."""
        self._collected.append(Skip(f"{origin_of(sources)}, conversation {key}", str(error)))

    def take(self) -> list[Skip]:
        """Return what was collected and clear it."""
        collected, self._collected = self._collected, []
        return collected


def sources_of(sample: Any, sources: list[SourceInfo]) -> list[SourceInfo]:
    """Return the sources of raw parts; those that are given for anything else."""
    if isinstance(sample, RawSampleData):
        return [source for part in sample.data if part is not None for source in part["__sources__"]]
    return sources


def reason_of(error: Exception) -> str:
    """Return the message of an error, or of its cause, because energon's own wrappers have no message."""
    if not str(error) and error.__cause__ is not None:
        error = error.__cause__  # type: ignore[assignment]
    return str(error) if isinstance(error, (DataError, ValueError)) else f"{type(error).__name__}: {error}"


def origin_of(sources: list[SourceInfo]) -> str:
    """Return dataset, shard and key of the sources of a sample."""
    origins = [f"{s.dataset_path}: shard {s.shard_name}, sample {_stem(s)}" for s in sources]
    return "; ".join(dict.fromkeys(origins)) or "a sample of unknown origin"


def _stem(source: SourceInfo) -> str:
    """Return a sample's key with the parts that were read, such as `000012 (jpg, json, txt)`."""
    names = [name.rpartition("/")[2].partition(".") for name in source.file_names]
    folder = source.file_names[0].rpartition("/")[0] if source.file_names else ""
    if not names:
        return f"number {source.index} (none of the wanted parts)"
    return f"{folder and folder + '/'}{names[0][0]} ({', '.join(part for _, _, part in names)})"
