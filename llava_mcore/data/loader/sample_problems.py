"""Unusable samples are skipped and reported, or end the run; odd ones get a warning."""

from __future__ import annotations

import logging
import tarfile
from pathlib import Path
from typing import Any

from megatron.energon import SourceInfo
from megatron.energon.flavors.webdataset.sample_loader import RawSampleData

from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.encode.encode import TooLongError
from llava_mcore.data.encode.marks import LITERAL_REASON
from llava_mcore.data.samples import Batch, Skip
from llava_mcore.errors import DataError
from llava_mcore.media.media import DEFAULT_FPS

MEMORY_ADVICE = (
    "if memory ran out, lower data.num_workers, data.max_waiting_bytes or data.packing_buffer_size, or let large "
    "images be skipped (data.max_image_pixels)"
)
DATA_ERRORS = (OSError, ValueError, KeyError, RecursionError, tarfile.TarError)
"""Errors that energon and its libraries raise for bad data. Anything else is a bug."""


class Skips:
    """The samples of one rank or loader process that were skipped since the last batch."""

    def __init__(self, *, stop_if_too_long: bool) -> None:
        """stop_if_too_long: a conversation that does not fit ends the run instead of being skipped."""
        self.stop_if_too_long = stop_if_too_long
        self._collected: list[Skip] = []

    def __call__(self, error: Exception, sample: Any, sources: list[SourceInfo] | None) -> None:
        """Record a sample that a step failed on, or raise if the run has to end.

        Args:
            sample: the input of the failing step: raw parts, a sample, or a list of samples.
        """
        skip = Skip(origin_of(sources_of(sample, sources or [])), reason_of(error))
        if not isinstance(error, (*DATA_ERRORS, DataError)) and not isinstance(error.__cause__, DATA_ERRORS):
            raise DataError(str(skip)) from error
        if self.stop_if_too_long and isinstance(error, TooLongError):
            raise DataError(f"{skip}; --on-too-long drop leaves such samples out") from error
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


logger = logging.getLogger(__name__)


class SampleWarnings:
    """Looks at the batches of one dataset."""

    def __init__(self, path: Path | str, assets: Assets) -> None:
        """path: of the data, for the messages; a URL if it is remote."""
        self._path = path
        self._handling = assets.chat.special_tokens_in_text
        self._literal = assets.chat.literal_marks
        self._advice = assets.chat.mark_advice
        self._told: set[str] = set()
        self._needs_fps = assets.plan.timed

    def look_at(self, batch: Batch) -> None:
        """Warn about special tokens in the text of samples, and about videos without fps, if the model's tokens or
        positions depend on it."""
        for token, key in batch.typed_tokens.items():
            if token not in self._told:
                self._told.add(token)
                if token in self._literal:
                    logger.warning(
                        "%s: the text of sample %s contains %s; it is read as plain text: %s",
                        self._path, key, token, LITERAL_REASON
                    )  # fmt: skip
                    continue
                reading = "read as plain text" if self._handling == "text" else "read as the token"
                logger.warning(
                    "%s: the text of sample %s contains the special token %s; it is always %s "
                    "(data.special_tokens_in_text)%s", self._path, key, token, reading,
                    f"; {self._advice[token]}" if token in self._advice else "",
                )  # fmt: skip
        if batch.without_fps is not None and self._needs_fps:
            self._needs_fps = False
            logger.warning(
                "%s: a video of sample %s has no fps; such videos count as %g frames per second. Prepare the data with "
                "--frames-fps", self._path, batch.without_fps, DEFAULT_FPS
            )  # fmt: skip
