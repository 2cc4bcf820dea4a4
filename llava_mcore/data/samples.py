"""The sample types of the pipeline, in the order in which they follow each other.

    VQASample or crude dict  ->  ChatSample  ->  EncodedSample  ->  Batch

Legend: b micro-batch size, s padded length, n tokens of a sample, k pictures of a sample, N tokens per picture.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron.energon import Batch as EnergonBatch
from megatron.energon import Sample, edataclass
from torch import Tensor

IMAGE_MARK = "<image>"
"""Where a picture stands in a turn's text, whatever the tokenizer calls its placeholder."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side says. Every `IMAGE_MARK` in the text takes the sample's next picture."""

    role: Literal["system", "user", "assistant"]
    text: str


@edataclass
class ChatSample(Sample):
    """A conversation with its pictures, not yet decoded, so that a shuffle buffer of them stays small."""

    turns: tuple[Turn, ...]
    images: tuple[bytes, ...]


@edataclass
class EncodedSample(Sample):
    """A conversation as the model reads it. Packing joins these."""

    input_ids: Tensor
    """int64 [n]; every picture already stands as its N placeholder ids."""
    trained: Tensor
    """bool [n]; True where the token itself (not the one after it) is to be learnt."""
    image_positions: Tensor
    """int64 [k * N]; indices into input_ids, in the order of pixel_values."""
    pixel_values: Tensor
    """float32 [k, 3, h, w]."""


@edataclass
class Batch(EnergonBatch):
    """One micro-batch of CPU tensors."""

    # The base class requires these two; defaults let other ranks build a batch from received tensors.
    __key__: list[str] = field(default_factory=list)
    __restore_key__: tuple[str | int | tuple, ...] = ()

    input_ids: Tensor
    """int64 [b, s]; padded with the pad id."""
    labels: Tensor
    """int64 [b, s]; labels[i, t] is the id to predict at t, that is input_ids[i, t + 1]; 0 where loss_mask is 0."""
    loss_mask: Tensor
    """float32 [b, s]; 1 where trained."""
    position_ids: Tensor
    """int64 [b, s]."""
    pixel_values: Tensor
    """float32 [number of pictures, 3, h, w]; the first dim may be 0."""
    image_positions: Tensor
    """int64 [number of pictures * N]; indices into the flattened [b * s], in the order of pixel_values."""
    sample_keys: list[str]
    """The key of each sample, b of them."""
    num_tokens: int
    """Tokens of all samples, pictures included and padding left out."""
