"""Preprocesses images and videos with the checkpoint's own processors; `audio_processor` does so with audio clips."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as F
from transformers import BaseImageProcessor, BaseVideoProcessor, SequenceFeatureExtractor
from transformers.image_processing_backends import PilBackend, TorchvisionBackend

from llava_mcore.config.sections.data import LIMITS
from llava_mcore.data.processors.images import ToRgb, decode_image, decode_pixels, noise, on_white
from llava_mcore.data.processors.video_frames import frame_chunks, probe_video, rows_of
from llava_mcore.data.samples import MediaSpan, Video
from llava_mcore.errors import DataError
from llava_mcore.media.batch_fields import NO_SCALE, normalize
from llava_mcore.media.media import MediaPlan, MediaTokens, Picture, Size, VideoShape

PROCESSOR_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors that a processor raises for invalid settings."""
_BACKENDS = ("Fast", "Pil")
"""Ends of names of classes that compute the same."""


class MediaPreprocessor(Protocol):
    """Encoded media -> rows of PIXEL_VALUES."""

    pixel_scale: Tensor
    """Normalizes the rows on the device (see `pixels.normalize`); empty if they are normalized."""

    @property
    def num_bytes(self) -> int:
        """Bytes of a row."""

    def settings(self) -> dict[str, Any]:
        """Return the processors' settings (see `settings_of`)."""

    def tiles(self, media: Sequence[MediaSpan]) -> Tensor:
        """Return the rows of some media in their order; there may be none. DataError if one cannot be decoded."""


def settings_of(
    prefix: str, processor: BaseImageProcessor | BaseVideoProcessor | SequenceFeatureExtractor
) -> dict[str, Any]:
    """Return a processor's settings as plain values, by the names that messages give them.

    Args:
        prefix: the processor, in messages.
    """
    settings: dict[str, Any] = json.loads(processor.to_json_string())
    name = type(processor).__name__
    for backend in _BACKENDS:
        name = name.removesuffix(backend)
    compared = {key: value for key, value in settings.items() if key != "processor_class" and not key.endswith("_type")}
    return {f"{prefix}: {key}": value for key, value in (compared | {"class": name}).items()}


class ImagePreprocessor:
    """The checkpoint's image and video processors: images and frames as bytes -> tiles of one fixed square size.

    Rescaling and normalizing are done on the device (`batch_fields.normalize`) if the result is bitwise the same: they
    take two thirds of the processor's time, and give four times as much data to pass between processes.
    """

    def __init__(
        self,
        processor: BaseImageProcessor,
        pixel_shape: tuple[int, ...],
        plan: MediaPlan,
        most_pixels: int = LIMITS.image_pixels,
        videos: BaseVideoProcessor | None = None,
    ) -> None:
        """Check the processors on a wide image; DataError if the result does not fit the vision tower.

        Args:
            pixel_shape: of a tile [3, height, width], or of a patch.
            videos: None if no conversation may have videos. One that does not fit the tower is not used.
        """
        self.most_pixels = most_pixels
        self.processor, self.videos = processor, videos
        self.to_rgb = to_rgb_of(processor)
        self.no_videos: str | None = None
        """Why the video processor is not used."""
        self.pixel_shape = pixel_shape
        self.plan = plan
        self.pixel_scale = NO_SCALE
        # Process an image that is resized and cropped: does the result fit the tower?
        probe = noise(pixel_shape[-1] + 17, pixel_shape[-1] // 2 + 5)
        expected = self._process([probe])
        shape = tuple(expected.shape[1:])
        if shape != pixel_shape:
            raise DataError(
                f"the image processor makes images of {' x '.join(map(str, shape))}, but the vision tower takes "
                f"{' x '.join(map(str, pixel_shape))}; correct size and crop_size in the processor's configuration"
            )
        # Leave rescaling and normalizing to the device if that gives the same bits, for frames too.
        of_video = self._try_video(probe)
        if processor.do_rescale and processor.do_normalize:
            self.pixel_scale = torch.tensor([processor.image_mean, processor.image_std]) * (
                1.0 / processor.rescale_factor
            )
            if not self._is_normalized(self._process([probe]), expected) or (
                of_video is not None and not self._is_normalized(self._process_video(probe_video(probe, 2)), of_video)
            ):
                self.pixel_scale = NO_SCALE
        # Decode into tensors, which is faster, if the processor gives the same bits for them.
        self._takes_tensors = isinstance(processor, TorchvisionBackend) and self._is_same_of_tensors(probe)
        # Process a long video in chunks if that gives the same bits.
        self._takes_chunks = self._is_same_in_chunks(probe)
        # Call the two remaining steps directly if they are all that the processor does.
        self._is_plain = not plan.any_size and bool(len(self.pixel_scale)) and self._resizes_and_crops_only()

    @property
    def num_bytes(self) -> int:
        """Bytes of a tile's or patch's pixels."""
        return math.prod(self.pixel_shape) * (1 if len(self.pixel_scale) else 4)

    def settings(self) -> dict[str, Any]:
        """Return the processors' settings."""
        videos = {} if self.videos is None else settings_of("video processor", self.videos)
        return settings_of("image processor", self.processor) | videos

    @property
    def _options(self) -> dict[str, bool]:
        """Options of the processors' calls: steps that are done on the device."""
        return {"do_rescale": False, "do_normalize": False} if len(self.pixel_scale) else {}

    def _process(self, images: Sequence[Picture], tokens: Sequence[MediaTokens] = ()) -> Tensor:
        """`tokens`: those of the images in their conversation; without them, each counts as the only image."""
        tokens = tokens or [self.plan.tokens([_size(image)])[0] for image in images]
        pixels = self.plan.pixels(self.processor, images, tokens, **self._options)
        num_rows = sum(item.num_rows for item in tokens)
        if len(pixels) != num_rows:
            raise DataError(
                f"the image processor returns {len(pixels)} tiles or patches, but the model expects {num_rows}"
            )
        return pixels

    def _process_video(self, frames: Tensor, tokens: MediaTokens | None = None) -> Tensor:
        """Return the tiles of a video's frames, uint8 [frames, 3, height, width].

        `tokens`: None if they have not been computed yet.
        """
        assert self.videos is not None, "load_assets says why there is no video processor"
        if tokens is None:
            (tokens,) = self.plan.video_tokens([VideoShape(len(frames), *frames.shape[-2:])])
        pixels = self.plan.video_pixels(self.videos, frames, tokens, **self._options)
        if len(pixels) != tokens.num_rows:
            raise DataError(
                f"the video processor returns {len(pixels)} tiles or patches, but the model expects {tokens.num_rows}"
            )
        return pixels

    def _try_video(self, probe: Image.Image) -> Tensor | None:
        """Return the tiles of a video; None if they do not fit the vision tower; then there is no video processor."""
        if self.videos is None:
            return None
        try:
            patches = self._process_video(probe_video(probe, 2))
        except (*PROCESSOR_ERRORS, DataError) as error:
            self.no_videos = f"the video processor cannot be used: {error}"
        else:
            if tuple(patches.shape[1:]) == self.pixel_shape:
                return patches
            self.no_videos = (
                f"the video processor makes frames of {' x '.join(map(str, patches.shape[1:]))}, and the vision tower "
                f"takes {' x '.join(map(str, self.pixel_shape))}; correct the size in its configuration"
            )
        self.videos = None
        return None

    def _is_normalized(self, pixels: Tensor, expected: Tensor) -> bool:
        """Return whether normalized bytes equal the processor's own output."""
        return pixels.dtype == torch.uint8 and torch.equal(normalize(pixels, self.pixel_scale), expected)

    def _is_same_of_tensors(self, probe: Image.Image) -> bool:
        """Return whether the processor takes decoded pixels, and gives the same bits as for Pillow's images."""
        wide, high = probe, probe.transpose(Image.Transpose.ROTATE_90)
        try:
            return all(torch.equal(self._process([F.pil_to_tensor(x)]), self._process([x])) for x in (wide, high))
        except PROCESSOR_ERRORS:
            return False

    def _resizes_and_crops_only(self) -> bool:
        """Return whether the processor's two steps give the result of all steps, for images of all proportions."""
        side = self.pixel_shape[-1]
        sizes = [(side + 17, side // 2 + 5), (side // 2 + 5, 2 * side + 1), (side, side), (side // 3 + 1, side // 3)]
        probes = [noise(*size) for size in sizes]
        return all(
            torch.equal(self._resize_and_crop(F.pil_to_tensor(probe)), self._process([probe])[0]) for probe in probes
        )

    def _resize_and_crop(self, pixels: Tensor) -> Tensor:
        """Like `_process` without rescaling and without checks of arguments, which take half as long."""
        if self.processor.do_resize:
            pixels = self.processor.resize(pixels, self.processor.size, resample=self.processor.resample)
        if self.processor.do_center_crop:
            pixels = self.processor.center_crop(pixels, self.processor.crop_size)
        return pixels

    def tiles(self, media: Sequence[MediaSpan]) -> Tensor:
        """Return the tiles [tiles, 3, h, w] or patches [patches, f] of some images and videos in their order.

        There may be none.

        The dtype is uint8 if `pixel_scale` normalizes them, and float32 if that is empty. The memory format may be
        channels_last, which is faster for decoding and resizing.

        Raises:
            DataError: an image cannot be decoded, or the processor returns a different number of tiles.
        """
        images = [item for item in media if isinstance(item.data, bytes)]
        tiles = self._image_tiles(images)
        if len(images) == len(media):
            return tiles
        of_images = iter(tiles.split([item.tokens.num_rows for item in images]))
        return torch.cat(
            [self._video_tiles(item) if isinstance(item.data, Video) else next(of_images) for item in media]
        )

    def _video_tiles(self, item: MediaSpan) -> Tensor:
        """Return the tiles of a video, whose frames have one size."""
        assert isinstance(item.data, Video)
        frames, augment = item.data.frames, item.augment

        def decode(frame: bytes) -> Tensor:
            pixels = decode_pixels(frame, self.most_pixels, self.to_rgb)
            return pixels if augment is None else augment(pixels)  # the same draws for each frame

        chunks = frame_chunks(frames, decode, self.plan.frames_per_step if self._takes_chunks else None)
        return rows_of(chunks, len(frames), item.tokens, self._process_video, self._process_chunk)

    def _process_chunk(self, frames: Tensor, video: VideoShape) -> Tensor:
        """Return the tiles of some frames of a longer video."""
        assert self.videos is not None
        return self.plan.chunk_pixels(self.videos, frames, video, **self._options)

    def _is_same_in_chunks(self, probe: Image.Image) -> bool:
        """Return whether a video's tiles are those of its chunks."""
        if self.videos is None:
            return False
        step = self.plan.frames_per_step
        video = probe_video(probe, 3 * step + 1)
        shape = VideoShape(len(video), *video.shape[-2:])
        try:
            parts = [self._process_chunk(chunk, shape) for chunk in video.split(2 * step)]
        except PROCESSOR_ERRORS:
            return False
        return torch.equal(torch.cat(parts), self._process_video(video))

    def _image_tiles(self, images: Sequence[MediaSpan]) -> Tensor:
        """Return the tiles of images."""
        if images and not self._is_plain:
            return self._process([self._image(item) for item in images], [item.tokens for item in images])
        if len(images) == 1:  # a batch of such samples is copied together
            return self._resize_and_crop(self._pixels(images[0]))[None]
        layout = torch.channels_last if len(self.pixel_shape) == 3 else torch.contiguous_format
        dtype = torch.uint8 if len(self.pixel_scale) else torch.float32
        pixels = torch.empty((len(images), *self.pixel_shape), dtype=dtype, memory_format=layout)
        for tile, item in zip(pixels, images, strict=True):
            tile.copy_(self._resize_and_crop(self._pixels(item)))
        return pixels

    def _image(self, item: MediaSpan) -> Picture:
        """Return a decoded image as the processor takes it, augmented if it is to be."""
        assert isinstance(item.data, bytes)
        if self._takes_tensors:
            return self._pixels(item)
        if item.augment is not None:
            return F.to_pil_image(self._pixels(item))
        return decode_image(item.data, self.most_pixels, self.to_rgb)

    def _pixels(self, item: MediaSpan) -> Tensor:
        """Return a decoded image as uint8 [3, h, w], augmented if it is to be."""
        assert isinstance(item.data, bytes)
        pixels = decode_pixels(item.data, self.most_pixels, self.to_rgb)
        return pixels if item.augment is None else item.augment(pixels)


def _size(image: Picture) -> Size:
    """Return height and width of an image."""
    return (image.shape[1], image.shape[2]) if isinstance(image, Tensor) else (image.height, image.width)


def to_rgb_of(processor: BaseImageProcessor) -> ToRgb:
    """Return how images become RGB: by the processor if its class has a method of its own for that (Idefics2).

    The method of the other classes drops transparency.
    """
    owner = next(cls for cls in type(processor).__mro__ if "convert_to_rgb" in vars(cls))
    return on_white if owner in (TorchvisionBackend, PilBackend) else processor.convert_to_rgb
