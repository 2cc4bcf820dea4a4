"""Warnings about samples that are used, but perhaps not as their author thinks; each is given once."""

from __future__ import annotations

import logging
from pathlib import Path

from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.encode.marks import LITERAL_REASON
from llava_mcore.data.samples import Batch
from llava_mcore.media.media import DEFAULT_FPS

logger = logging.getLogger(__name__)


class SampleWarnings:
    """Looks at the batches of one dataset."""

    def __init__(self, path: Path | str, assets: Assets) -> None:
        """path: of the data, for the messages; a URL if it is remote."""
        self._path = path
        self._handling = assets.chat.special_tokens_in_text
        self._literal = assets.chat.literal_marks
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
                    "(data.special_tokens_in_text)", self._path, key, token, reading
                )  # fmt: skip
        if batch.without_fps is not None and self._needs_fps:
            self._needs_fps = False
            logger.warning(
                "%s: a video of sample %s has no fps; such videos count as %g frames per second. Prepare the data with "
                "--frames-fps", self._path, batch.without_fps, DEFAULT_FPS
            )  # fmt: skip
