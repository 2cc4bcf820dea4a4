"""The sample types of the pipeline, in order.

    raw parts  ->  ChatSample  ->  TokenSample  ->  (packed TokenSample)  ->  EncodedSample  ->  Batch

Legend: b micro-batch size, s padded length, n tokens of a conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from megatron.energon import Batch as EnergonBatch
from megatron.energon import Sample, edataclass
from numpy.typing import NDArray
from torch import Tensor

from llava_mcore.media.media import MediaTokens

TEXT_PARTS = ("json", "jsn", "txt", "text")
IMAGE_PARTS = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm")
AUDIO_PARTS = ("wav", "flac", "mp3", "ogg")
"""File name suffixes of a sample's parts."""
IMAGE_MARK, VIDEO_MARK, AUDIO_MARK = "<image>", "<video>", "<audio>"
"""Marks of images, videos and audio clips in a turn's text, independent of the tokenizer's placeholders."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. Each mark in the text refers to the sample's next image, video or audio clip."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str
    trained: bool = True
    """Whether an answer is trained; the other roles never are."""
    reasoning: str = ""
    """The assistant's reasoning before the text."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """More of the message for the chat template: "tool_calls", "tool_call_id", "name"."""


@dataclass(frozen=True, slots=True)
class Video:
    """A video as a sequence of encoded images, one per frame."""

    frames: tuple[bytes, ...]
    fps: float | None = None
    """Frames per second; None if unknown."""


@dataclass(frozen=True, slots=True)
class Audio:
    """An encoded audio clip."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns with their images, videos and audio clips, not yet decoded, so that a shuffle buffer stays small."""

    turns: tuple[Turn, ...]
    images: tuple[bytes, ...]
    tokens: Any = None
    """The entry that `prepare` has stored in the json (see `stored_tokens`)."""
    videos: tuple[Video, ...] = ()
    audios: tuple[Audio, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    """Functions that the assistant may call, for the chat template."""

    @property
    def num_media(self) -> dict[str, int]:
        """Images, videos and audio clips by their mark."""
        return {IMAGE_MARK: len(self.images), VIDEO_MARK: len(self.videos), AUDIO_MARK: len(self.audios)}

    @property
    def frames(self) -> tuple[bytes, ...]:
        """The frames of all videos."""
        return tuple(frame for video in self.videos for frame in video.frames)


@edataclass
class ChatSample(Sample):
    """One sample of a shard: one conversation, or several that were packed when the shard was written."""

    conversations: tuple[Conversation, ...]


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """An encoded image, video or audio clip, and its tokens and position in its conversation."""

    data: bytes | Video | Audio
    start: int
    """Index of its first token in input_ids."""
    tokens: MediaTokens
    augment: Callable[[Tensor], Tensor] | None = None
    """Changes its decoded images or frames, uint8 [3, h, w]; None: they stay as they are."""

    @property
    def end(self) -> int:
        """Index after its last token."""
        return self.start + len(self.tokens)

    @property
    def num_bytes(self) -> int:
        """Size of the encoded media."""
        if isinstance(self.data, Video):
            return sum(map(len, self.data.frames))
        return len(self.data.data if isinstance(self.data, Audio) else self.data)


@dataclass(frozen=True, slots=True)
class TokenConversation:
    """A tokenized conversation with encoded images, videos and audio clips."""

    key: str
    """The sample's key; with a number appended if the sample was packed when it was written."""
    input_ids: NDArray[np.int64]
    """[n]; every image, video and audio clip is expanded to its tokens."""
    trained: NDArray[np.bool_]
    """[n]; True if the model is trained to predict this token (not the one after it)."""
    media: tuple[MediaSpan, ...]
    """In the order of their tokens."""
    truncated: bool
    """Whether the end was truncated."""
    typed: tuple[str, ...] = ()
    """Special tokens in the text of its turns; empty if its tokens were stored."""
    dataset: int = 0
    """Index of its dataset in the blend."""

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_patches(self) -> int:
        """The size of the tower's input: patches of all images and frames, frames of all audio clips."""
        return sum(item.tokens.num_patches for item in self.media)

    @property
    def num_without_fps(self) -> int:
        """Videos that do not say how many frames belong to a second."""
        return sum(isinstance(item.data, Video) and item.data.fps is None for item in self.media)

    @property
    def num_bytes(self) -> int:
        """Memory that its tokens and encoded media take; parts of it may belong to other conversations too."""
        return self.input_ids.nbytes + self.trained.nbytes + sum(item.num_bytes for item in self.media)

    @property
    def num_rows(self) -> int:
        """Rows of pixel_values: tiles or patches of all images and videos, mel frames of all audio clips."""
        return sum(item.tokens.num_rows for item in self.media)


@edataclass
class TokenSample(Sample):
    """One conversation, or those of a pack."""

    conversations: list[TokenConversation]
    num_tokens: int
    """Tokens of all conversations."""
    num_patches: int = 0
    """Patches of all their images, frames and audio clips."""

    @property
    def num_bytes(self) -> int:
        """Memory that its tokens and encoded media take."""
        return sum(conversation.num_bytes for conversation in self.conversations)


@edataclass
class EncodedSample(Sample):
    """A TokenSample with its images, frames and audio clips decoded."""

    conversations: list[TokenConversation]
    pixel_values: Tensor
    """Pixels of all conversations: tiles [tiles, 3, h, w] or patches [patches, f], uint8 or (if the processor requires
    it) float32; or rows of mel frames [rows, mel bins], float32."""


@dataclass(frozen=True)
class Skip:
    """A sample that was skipped: where it is and why."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@edataclass
class Batch(EnergonBatch):
    """One micro-batch of CPU tensors: b rows, or one row of packed conversations."""

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
    """int64 [b, s]; they restart at 0 with every packed conversation."""
    media: dict[str, Tensor]
    """The fields of the architecture (see `llava_mcore.media.batch_fields`)."""
    cu_seqlens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    """int32 [conversations + 1]: start of each packed conversation; the padding after the last one counts as another
    one; [0] if nothing is packed."""
    dataset_ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    """int32 [b, s], the index of each token's dataset in a blend, 0 in padding; empty if there is one dataset."""
    sample_keys: list[str]
    """The key of every conversation."""
    num_tokens: int
    """Tokens of all conversations, including media, without padding."""
    num_pairs: int = 0
    """Pairs of tokens in causal attention: n * (n + 1) / 2 for a conversation of n tokens."""
    sums: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Named sums for the log, each a total and a count (see `BATCH_SUMS` in data/loader/collate.py)."""
    typed_tokens: dict[str, str] = field(default_factory=dict)
    """Special tokens in the text of turns -> the key of a conversation with one."""
    without_fps: str | None = None
    """The key of a conversation with a video that does not say its fps."""
    skipped: list[Skip] = field(default_factory=list)
    """Samples skipped between the previous batch and this one."""
