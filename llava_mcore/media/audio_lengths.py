"""How long a clip is at each step on its way to the language model.

A clip of L mel frames becomes h = ceil(L / 2) hidden frames (the second convolution has stride 2), and floor(h / 2)
features (average pooling of pairs; the last frame of an odd number is attended to, but has no feature).

Hidden frame j depends on the mel frames 2j - 2 to 2j + 2, so a clip needs its frames 0 to 2h: one or two after its end.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder

from llava_mcore.compat.transformers import encoded_lengths

ROWS_BEFORE = 1
"""Zero rows before a clip's mel frames: the padding of the first convolution."""


@dataclass(frozen=True)
class ClipLengths:
    """`mel`: L, `hidden`: h, `features`: those that reach the language model."""

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
