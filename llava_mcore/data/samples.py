"""The sample types of the pipeline, in the order in which they follow each other.

    raw parts  ->  ChatSample  ->  TokenSample  ->  (packed TokenSample)  ->  EncodedSample  ->  Batch

Legend: b micro-batch size, s padded length, n tokens of a conversation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from megatron.energon import Batch as EnergonBatch
from megatron.energon import Sample, edataclass
from numpy.typing import NDArray
from torch import Tensor

from llava_mcore.models.media import MediaTokens

TEXT_PARTS = ("json", "jsn", "txt", "text")
IMAGE_PARTS = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm")
"""How the names of a sample's parts end."""
IMAGE_MARK, VIDEO_MARK = "<image>", "<video>"
"""Where a picture or video stands in a turn's text, whatever the tokenizer calls its placeholder."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side says. Each mark in the text takes the sample's next picture or video."""

    role: Literal["system", "user", "assistant"]
    text: str


@dataclass(frozen=True, slots=True)
class Video:
    """A video as the pictures that its frames are, in their order, not yet decoded."""

    frames: tuple[bytes, ...]
    fps: float | None = None
    """How many of these frames belong to a second; None if nobody says."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns with their pictures and videos, not yet decoded, so that a shuffle buffer of them stays small."""

    turns: tuple[Turn, ...]
    images: tuple[bytes, ...]
    tokens: Any = None
    """What `prepare` has stored of it (see `stored_tokens`), as it stands in the json."""
    videos: tuple[Video, ...] = ()

    @property
    def frames(self) -> tuple[bytes, ...]:
        """The frames of all videos."""
        return tuple(frame for video in self.videos for frame in video.frames)


@edataclass
class ChatSample(Sample):
    """What one key of a shard holds: one conversation, or several that were packed when the shard was written."""

    conversations: tuple[Conversation, ...]


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """A picture or video, not yet decoded, and what it is in its conversation."""

    data: bytes | Video
    start: int
    """Index of its first token in input_ids."""
    tokens: MediaTokens

    @property
    def end(self) -> int:
        """Index behind its last token."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class TokenConversation:
    """A conversation as the model reads it, its pictures and videos still undecoded."""

    key: str
    """The sample's key; with a number behind it in a sample that was packed beforehand."""
    input_ids: NDArray[np.int64]
    """[n]; every picture and video is already there as its own tokens."""
    trained: NDArray[np.bool_]
    """[n]; True where the token itself (not the one after it) is to be learnt."""
    media: tuple[MediaSpan, ...]
    """In the order of their tokens."""
    truncated: bool
    """Whether the end was cut off."""
    typed: tuple[str, ...] = ()
    """Special tokens that stand in the text of its turns; none if its tokens were stored."""

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_patches(self) -> int:
        """Patches of all pictures and frames."""
        return sum(item.tokens.num_patches for item in self.media)

    @property
    def num_tiles(self) -> int:
        """Tiles of all pictures and videos."""
        return sum(item.tokens.num_tiles for item in self.media)


@edataclass
class TokenSample(Sample):
    """One conversation, or those of a pack."""

    conversations: list[TokenConversation]
    num_tokens: int
    """Of all conversations."""
    num_patches: int = 0
    """Of all their pictures and frames."""


@edataclass
class EncodedSample(Sample):
    """A TokenSample with its pictures and frames decoded."""

    conversations: list[TokenConversation]
    pixel_values: Tensor
    """[tiles, 3, h, w]; those of all conversations, uint8 or (if the processor demands it) float32."""


@dataclass(frozen=True)
class Skip:
    """A sample that was left out: where it lies and why."""

    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


@edataclass
class Batch(EnergonBatch):
    """One micro-batch of CPU tensors: b rows, or one row in which packed conversations follow each other."""

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
    """int64 [b, s]; they begin anew with every packed conversation."""
    media: dict[str, Tensor]
    """The fields of the architecture (see `llava_mcore.batch_fields`)."""
    cu_seqlens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    """int32 [conversations + 1]: where each packed conversation begins, the padding behind the last one being one of
    its own; [0] when nothing is packed."""
    sample_keys: list[str]
    """The key of every conversation."""
    num_tokens: int
    """Tokens of all conversations, media included and padding left out."""
    num_pairs: int = 0
    """Pairs of tokens that causal attention looks at: n * (n + 1) / 2 for a conversation of n tokens."""
    num_truncated: int = 0
    """Conversations whose end was cut off."""
    typed_tokens: dict[str, str] = field(default_factory=dict)
    """Special tokens that stand in the text of turns -> the key of a conversation with one."""
    skipped: list[Skip] = field(default_factory=list)
    """What was left out between the batch before and this one."""
