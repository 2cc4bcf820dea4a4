"""The feature extractor of a checkpoint, and audio clips as what its encoder reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoFeatureExtractor, PretrainedConfig, PreTrainedTokenizerBase, WhisperFeatureExtractor

from llava_mcore.data.processors.audio_files import decode_audio, require_libraries
from llava_mcore.data.processors.image_processor import settings_of
from llava_mcore.data.samples import Audio, MediaSpan
from llava_mcore.errors import DataError
from llava_mcore.files.torch_files import why_not_loaded
from llava_mcore.media.batch_fields import NO_SCALE
from llava_mcore.media.clip_plan import AudioPlan
from llava_mcore.models.architectures.registry import architecture_of, classes_that_take_audios


@dataclass(frozen=True)
class Audios:
    """The feature extractor and the tokenizer's placeholder; or, in `reason`, why samples with audio cannot be used."""

    extractor: WhisperFeatureExtractor | None = None
    token: str | None = None
    reason: str | None = None


def choose_audios(
    folders: Sequence[Path],
    files: Sequence[str],
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    load_errors: tuple[type[Exception], ...],
    problems: list[str],
) -> Audios:
    """Load the feature extractor of the first folder that has one; for a class that takes audio it must be there.

    Args:
        files: names that a feature extractor's settings may have.
        load_errors: errors that transformers raises for missing or invalid files.
        problems: problems are added here.
    """
    architecture = architecture_of(config)
    if not architecture.takes_audios:
        # A class without audio is no problem until a sample has some.
        known = ", ".join(classes_that_take_audios())
        return Audios(reason=f"{architecture.model_class.__name__} does not support audio; classes that do: {known}")
    # A class with audio cannot do without a feature extractor.
    token = architecture.audio_placeholder(tokenizer)
    folder = next((f for f in folders if any((f / name).is_file() for name in files)), None)
    if folder is None:
        problems.append(f"no feature extractor in {folders[0]}: none of {', '.join(files)}")
        return Audios(token=token)
    errors: tuple[type[Exception], ...] = (*load_errors, DataError)
    try:
        require_libraries()
        extractor = AutoFeatureExtractor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if not isinstance(extractor, WhisperFeatureExtractor):
            raise DataError(f"it is a {type(extractor).__name__}, not a WhisperFeatureExtractor")
    except errors as error:
        problems.append(f"the feature extractor in {folder} cannot be used: {why_not_loaded(error)}")
        return Audios(token=token)
    return Audios(extractor, token)


class AudioPreprocessor:
    """The checkpoint's feature extractor: clips as bytes -> rows of mel frames, which nothing normalizes later."""

    def __init__(self, extractor: WhisperFeatureExtractor, plan: AudioPlan) -> None:
        self.extractor, self.plan = extractor, plan
        self.pixel_scale = NO_SCALE

    @property
    def num_bytes(self) -> int:
        """Bytes of a row."""
        return self.plan.num_mel_bins * torch.float32.itemsize

    def settings(self) -> dict[str, Any]:
        """Return the extractor's settings."""
        return settings_of("feature extractor", self.extractor)

    def tiles(self, media: Sequence[MediaSpan]) -> Tensor:
        """Return the rows [rows, mel bins] float32 of some audio clips in their order. There may be none.

        Raises:
            DataError: an audio clip cannot be decoded.
        """
        rows = [self._rows(item) for item in media]
        return torch.cat(rows) if rows else torch.empty(0, self.plan.num_mel_bins)

    def _rows(self, item: MediaSpan) -> Tensor:
        assert isinstance(item.data, Audio), "check_media refuses samples with images or videos"
        wave = decode_audio(item.data.data, self.plan.sampling_rate)
        return self.plan.audio_rows(self.extractor, wave, item.tokens)
