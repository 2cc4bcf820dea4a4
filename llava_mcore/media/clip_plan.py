"""Audio clips as tokens and as rows of mel frames, by the checkpoint's own feature extractor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig, WhisperFeatureExtractor
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder

from llava_mcore.compat.transformers import encoded_lengths
from llava_mcore.errors import ConversionError, DataError
from llava_mcore.media.batch_fields import AUDIO_FIELDS, FEATURE_POSITIONS, MEDIA_SEQLENS
from llava_mcore.media.media import MediaBudget, MediaPlan, MediaTokens, Size

ROWS_BEFORE = 1
"""Zero rows before a clip's mel frames: the padding of the first convolution."""


@dataclass(frozen=True)
class ClipLengths:
    """How long a clip is at each step on its way to the language model.

    A clip of L `mel` frames becomes h = ceil(L / 2) `hidden` frames (the second convolution has stride 2), and
    floor(h / 2) `features` (average pooling of pairs; the last frame of an odd number is attended to, but has no
    feature).

    Hidden frame j depends on the mel frames 2j - 2 to 2j + 2, so a clip needs its frames 0 to 2h: one or two after its
    end.
    """

    mel: int
    hidden: int
    features: int

    @property
    def rows(self) -> int:
        """Rows that the encoder reads: a zero row, then the mel frames 0 to 2h. An even number."""
        return ROWS_BEFORE + 2 * self.hidden + 1

    @classmethod
    def of_mel(cls, num_frames: int) -> ClipLengths:
        """Ask transformers' encoder for the lengths of a clip of this many mel frames."""
        hidden, features = encoded_lengths(Qwen2AudioEncoder, num_frames)
        return cls(num_frames, hidden, max(0, features))


def frames_kept(hf: PretrainedConfig, hidden: int, features: int) -> dict[int, int]:
    """Map the numbers of mel, hidden and pooled frames in Hugging Face's padded encoder to those of a clip.

    Args:
        hf: of the whole model.
        hidden, features: those of the clip.
    """
    padded = int(hf.audio_config.max_source_positions)
    return {2 * padded: 2 * hidden, padded: hidden, padded // 2: features}


FRAMES_AFTER = 4
"""Frames of silence after a clip that are computed. The last two do not depend on it, and equal all that follow."""
NUM_KNOWN = 3000
"""Maximum number of lengths whose tokens are cached."""


class AudioPlan(MediaPlan):
    """Each clip's features replace as many placeholders; a class without images."""

    any_size = True
    unit = "20 ms frames of audio"
    # The smallest clip becomes one token, for which the encoder computes two frames from six rows.
    patches_per_tile = 2
    rows_per_tile = 6
    tokens_per_tile = 1

    def __init__(self, hf: PretrainedConfig, extractor: WhisperFeatureExtractor) -> None:
        """Raises ConversionError for a feature extractor whose frames are not those of the encoder."""
        check_extractor(extractor, hf.audio_config)
        self._arguments = (hf, extractor)
        self.fields, self.audio_token_id = AUDIO_FIELDS, int(hf.audio_token_id)
        self.sampling_rate, self.hop_length = int(extractor.sampling_rate), int(extractor.hop_length)
        self.most_samples = int(extractor.n_samples)
        self.num_mel_bins = int(hf.audio_config.num_mel_bins)
        self._of_length = lru_cache(NUM_KNOWN)(self._tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        """The cache is not copied."""
        return type(self), self._arguments

    def tokens(self, sizes: Sequence[Size]) -> list[MediaTokens]:
        """Return an empty list without images. DataError for images."""
        if sizes:
            raise DataError("the model takes audio clips, not images")
        return []

    def audio_tokens(self, num_samples: Sequence[int]) -> list[MediaTokens]:
        """Return the tokens of clips with these numbers of samples at `sampling_rate`.

        Raises:
            DataError: a clip is longer than the encoder takes, or too short for a token.
        """
        return [self._of_length(self.num_frames(count)) for count in num_samples]

    @property
    def largest(self) -> MediaBudget:
        """The longest clip that the encoder takes."""
        item = self._of_length(self.num_frames(self.most_samples))
        return MediaBudget(len(item), item.num_patches)

    def num_frames(self, num_samples: int) -> int:
        """Return the mel frames of a clip that the encoder attends to. DataError like `audio_tokens`."""
        if num_samples > self.most_samples:
            raise DataError(
                f"an audio clip is {num_samples / self.sampling_rate:.1f} seconds long, but the model takes at most "
                f"{self.most_samples / self.sampling_rate:g}; cut it into shorter ones"
            )
        return -(-num_samples // self.hop_length)  # what is left of the extractor's attention mask

    def _tokens(self, num_frames: int) -> MediaTokens:
        lengths = ClipLengths.of_mel(num_frames)
        if lengths.features < 1:
            raise DataError(f"a clip of {num_frames} frames of {self.hop_length} samples is too short for a token")
        return MediaTokens(
            ids=np.full(lengths.features, self.audio_token_id, dtype=np.int64),
            num_rows=lengths.rows,
            num_patches=lengths.hidden,
            num_features=lengths.features,
            values={
                FEATURE_POSITIONS: np.arange(lengths.features),
                MEDIA_SEQLENS: np.array([lengths.hidden], dtype=np.int32),
            },
        )

    def audio_rows(self, extractor: WhisperFeatureExtractor, wave: NDArray[np.float32], tokens: MediaTokens) -> Tensor:
        """Return the encoder's rows of a clip, [num_rows, mel bins] float32.

        They are those of the clip padded to the encoder's whole length, but only the needed ones are computed: silence
        after the clip neither changes its frames nor is the loudest frame, by which the extractor normalizes.

        Args:
            wave: [samples] at `sampling_rate`.
        """
        length = min((self.num_frames(len(wave)) + FRAMES_AFTER) * self.hop_length, self.most_samples)
        processed = extractor(wave, sampling_rate=self.sampling_rate, max_length=length, return_tensors="pt")
        return self.rows_of(processed["input_features"][0], tokens)

    def rows_of(self, features: Tensor, tokens: MediaTokens) -> Tensor:
        """Return the encoder's rows of the extractor's features [mel bins, frames], padded or not."""
        rows = torch.zeros(tokens.num_rows, self.num_mel_bins)
        needed = features[:, : tokens.num_rows - ROWS_BEFORE]  # no frame follows the encoder's last one
        rows[ROWS_BEFORE : ROWS_BEFORE + needed.shape[1]] = needed.t()
        return rows


def check_extractor(extractor: WhisperFeatureExtractor, encoder: PretrainedConfig) -> None:
    """Raise ConversionError for settings with other frames than the encoder's."""
    mismatches = [
        f"{key} = {value}, not {expected}"
        for key, value, expected in (
            ("feature_size", extractor.feature_size, encoder.num_mel_bins),
            ("nb_max_frames", extractor.nb_max_frames, 2 * encoder.max_source_positions),
            ("dither", extractor.dither, 0.0),
            ("n_samples % hop_length", extractor.n_samples % extractor.hop_length, 0),
        )
        if value != expected
    ]
    if mismatches:
        raise ConversionError(
            f"{type(extractor).__name__} has {'; '.join(mismatches)}: correct the settings in preprocessor_config.json"
        )
