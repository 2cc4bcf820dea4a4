"""How images, videos and audio become tokens and tensors: between architectures and the data pipeline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor
from transformers import (
    BaseImageProcessor,
    BaseVideoProcessor,
    PreTrainedTokenizerBase,
    WhisperFeatureExtractor,
)

from llava_mcore.media.batch_fields import FEATURE_POSITIONS, IMAGE_FIELDS, PIXEL_SCALE, PIXEL_VALUES, Fields

Picture = Image | Tensor
"""A decoded image, RGB: Pillow's, or uint8 [3, height, width]."""
Size = tuple[int, int]
"""Height and width of an image in pixels, after its EXIF rotation."""


class VideoShape(NamedTuple):
    """The properties of a video that determine its tokens. `height`, `width`: of every frame in pixels, after EXIF.

    `fps`: frames per second; None if unknown.
    """

    num_frames: int
    height: int
    width: int
    fps: float | None = None


class MediaBudget(NamedTuple):
    """How much of a pack one image or audio clip uses. `patches` are counted in `MediaPlan.unit`."""

    tokens: int
    patches: int


@dataclass(frozen=True)
class Processing:
    """A folder's settings for images, videos and audio besides its config.json.

    `images`, `videos`, `audios`: None if the class does not take such, or there is no processor for them. `settings`:
    processor_config.json, empty without one.
    """

    tokenizer: PreTrainedTokenizerBase
    images: BaseImageProcessor | None
    settings: Mapping[str, Any]
    videos: BaseVideoProcessor | None = None
    audios: WhisperFeatureExtractor | None = None

    @property
    def image_processor(self) -> BaseImageProcessor:
        """The image processor of a class that takes images."""
        assert self.images is not None, "load_assets reports that there is none"
        return self.images

    @property
    def feature_extractor(self) -> WhisperFeatureExtractor:
        """The feature extractor of a class that takes audio."""
        assert self.audios is not None, "load_assets reports that there is none"
        return self.audios


@dataclass(frozen=True)
class AroundMedia:
    """How a class's processor rewrites a rendered text around its images before it tokenizes it.

    `rules`: regular expressions and what replaces each of their matches, in this order. `marks`: tokens that it puts
    around images; they are never trained.
    """

    rules: tuple[tuple[str, str], ...] = ()
    marks: tuple[str, ...] = ()


NOTHING_AROUND = AroundMedia()


@dataclass(frozen=True)
class MediaTokens:
    """The tokens of one image, video or audio clip in a sequence.

    `ids`: int64 [n], its placeholders, with marks and separators between them. `num_rows`: its rows of PIXEL_VALUES,
    which are tiles of the tower's size, patches, or mel frames. `num_patches`: what the tower computes on, over all
    rows. `num_features`: rows that the connector returns for it. `values`: the batch's other fields; indices in them
    are counted from its own first token or feature. `positions`: int64 [axes, n], counted from that of the first
    token, if they are not simply consecutive; the token after them then has `next_position`.
    """

    ids: NDArray[np.int64]
    num_rows: int
    num_patches: int
    num_features: int
    values: Mapping[str, NDArray[Any]]
    positions: NDArray[np.int64] | None = None
    next_position: int = 0

    def __len__(self) -> int:
        return len(self.ids)


def index_values(fields: Fields, media: Sequence[MediaTokens], starts: Sequence[int]) -> dict[str, Tensor]:
    """Return the fields of a micro-batch that follow from its media's tokens: all except the pixels and their scale.

    Args:
        media: in the order of their pixels.
        starts: the start of each item's tokens in the flattened [b * s].
    """
    features = [0, *accumulate(item.num_features for item in media)][:-1]
    return {
        name: field.joined([item.values[name] for item in media], starts if field.index_of == "tokens" else features)
        for name, field in fields.items()
        if name not in (PIXEL_VALUES, PIXEL_SCALE)
    }


def position_ids(length: int, images: Sequence[MediaTokens], starts: Sequence[int], num_axes: int) -> NDArray[np.int64]:
    """Return the positions [axes, n] of a conversation of `length` tokens: text counts on along all axes equally.

    Args:
        starts: the first token of each image.
    """
    positions = np.tile(np.arange(length), (num_axes, 1))
    for item, start in zip(images, starts, strict=True):
        if item.positions is None:
            continue
        first, end = int(positions[0, start]), start + len(item)
        positions[:, start:end] = first + item.positions
        positions[:, end:] += item.next_position - len(item)
    return positions


DEFAULT_FPS = 24.0
"""Frame rate that transformers assumes when it is unknown."""


class MediaPlan(ABC):
    """How the images, videos and audio of a checkpoint become tokens and tensors. Loader processes inherit it."""

    image_token_id: int | None = None
    """Placeholder of an image in text that is not expanded yet; None: images are not supported."""
    audio_token_id: int | None = None
    """The same for an audio clip."""
    sampling_rate: int = 0
    """Samples per second of audio clips."""
    unit: ClassVar[str] = "patches of images and frames"
    """The unit of `patches_per_tile` and data.max_media_tokens, for messages about a sample."""
    video_token_id: int | None = None
    """The same for a video; None: videos are not supported."""
    timed: ClassVar[bool] = False
    """Whether a video's tokens or positions depend on its fps, which is DEFAULT_FPS if unknown."""
    fields: Fields
    """Fields of a micro-batch."""
    any_size: bool
    """Whether the tokens depend on the sizes of the images."""
    num_axes: int = 1
    """Coordinates of a position: 1, or 3 for time, height and width."""
    patches_per_tile: int
    """Patches that the tower computes on per tile. Without tiles (packed patches, audio): of the smallest item."""
    rows_per_tile: int = 1
    """Rows of PIXEL_VALUES, in the same sense."""
    frames_per_step: int = 1
    """Frames of a video that share rows of PIXEL_VALUES."""
    tokens_per_tile: int
    """Tokens, in the same sense. If the number varies, rarely fewer. Determines the size of pixel buffers."""
    around_media: AroundMedia = NOTHING_AROUND
    """Changes to the text around images; the tokens of an image are only those that replace its placeholder."""

    def pixels(
        self, processor: BaseImageProcessor, images: Sequence[Picture], tokens: Sequence[MediaTokens], **options: Any
    ) -> Tensor:
        """Return the tiles [tiles, 3, h, w] of some images of one conversation, by its image processor.

        Args:
            images: RGB, upright.
            tokens: the result of `tokens` for each of them.
            options: of the call of the processor.
        """
        return processor(images=list(images), return_tensors="pt", **options)["pixel_values"]

    def processed_pixels(
        self, processed: Mapping[str, Tensor], rows: Sequence[Sequence[MediaTokens]], row_shape: tuple[int, ...]
    ) -> Tensor:
        """Return the tiles [tiles, 3, side, side] or patches [patches, f] in the output of a folder's own processor.

        Some processors pad every image to the same number of tiles, some every row.

        Args:
            processed: of the images of a batch.
            rows: the tokens of the images of each row; there is at least one.
            row_shape: of a tile or a patch.
        """
        pixels, counts = processed["pixel_values"], [item.num_rows for row in rows for item in row]
        if pixels.ndim == 1 + len(row_shape):
            return pixels
        if len(pixels) != len(counts):
            counts = [sum(item.num_rows for item in row) for row in rows]
        return torch.cat([tiles[:count] for tiles, count in zip(pixels, counts, strict=True)])

    def video_pixels(
        self, processor: BaseVideoProcessor, frames: Tensor, tokens: MediaTokens, **options: Any
    ) -> Tensor:
        """Return the tiles [tiles, 3, h, w] of a video, by the video processor; no frame is dropped.

        Args:
            frames: uint8 [frames, 3, height, width], upright.
            tokens: the result of `video_tokens`.
            options: of the call of the processor.
        """
        processed = processor(videos=[frames], do_sample_frames=False, return_tensors="pt", **options)
        return processed["pixel_values_videos"][0]

    def chunk_pixels(self, processor: BaseVideoProcessor, frames: Tensor, video: VideoShape, **options: Any) -> Tensor:
        """Return the rows of some consecutive frames of a video, whose rows follow each other.

        Args:
            frames: like that of `video_pixels`; their number is a multiple of `frames_per_step`, unless they are the
                last ones.
            video: the shape of the whole video.
        """
        processed = processor(videos=[frames], do_sample_frames=False, return_tensors="pt", **options)
        return processed["pixel_values_videos"][0]

    @abstractmethod
    def tokens(self, sizes: Sequence[Size]) -> list[MediaTokens]:
        """Return the tokens of a conversation's images. Without `any_size`, the sizes are ignored."""

    def video_tokens(self, videos: Sequence[VideoShape]) -> list[MediaTokens]:
        """Return the tokens of a conversation's videos. Only called if there is a `video_token_id`."""
        raise NotImplementedError(f"{type(self).__name__} does not support videos")

    def audio_tokens(self, num_samples: Sequence[int]) -> list[MediaTokens]:
        """Return the tokens of a conversation's audio clips. Only called if there is an `audio_token_id`."""
        raise NotImplementedError(f"{type(self).__name__} does not support audio")

    @property
    def smallest(self) -> MediaBudget:
        """The least that an image uses; without images, an audio clip."""
        return MediaBudget(self.tokens_per_tile, self.patches_per_tile)

    @property
    def largest(self) -> MediaBudget | None:
        """The most that an image (or audio clip) uses; None: the range of the image processor's areas decides."""
        return None

    @property
    def placeholders(self) -> tuple[int, ...]:
        """Ids of the tokens that features replace."""
        known = (self.image_token_id, self.video_token_id, self.audio_token_id)
        return tuple(token_id for token_id in known if token_id is not None)


class SameTokens(MediaPlan):
    """Every image is one tile, with one placeholder per feature."""

    def __init__(self, image_token_id: int, num_tokens: int, num_patches: int) -> None:
        """num_tokens, num_patches: of an image, in the language model and in the tower."""
        self.image_token_id, self.fields = image_token_id, IMAGE_FIELDS
        self.any_size, self.tokens_per_tile = False, num_tokens
        ids = np.full(num_tokens, image_token_id, dtype=np.int64)
        self.patches_per_tile = num_patches
        self._image = MediaTokens(ids, 1, num_patches, num_tokens, {FEATURE_POSITIONS: np.arange(num_tokens)})

    def tokens(self, sizes: Sequence[Size]) -> list[MediaTokens]:
        """Return the same tokens for every image."""
        return [self._image] * len(sizes)

    @property
    def largest(self) -> MediaBudget:
        """Every image takes the same."""
        return self.smallest


def image_tokens(ids: Sequence[int], image_token_id: int, *, num_tiles: int, num_patches: int) -> MediaTokens:
    """Return the tokens of an image whose features replace its placeholders in order.

    Args:
        ids: [n], with marks around and between the placeholders.
        num_patches: patches of all tiles.
    """
    array = np.asarray(ids, dtype=np.int64)
    positions = np.flatnonzero(array == image_token_id)
    return MediaTokens(array, num_tiles, num_patches, len(positions), {FEATURE_POSITIONS: positions})
