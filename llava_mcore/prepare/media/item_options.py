"""Options of one image or video in a row, by qwen-vl-utils' names: sizes of images, and which frames are taken.

They stand beside the reference: {"path": "a.jpg", "max_pixels": 50176}, {"path": "a.mp4", "fps": 1, "video_end": 30}.
Images are resized when they are written, so training needs nothing but the shards.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from io import BytesIO
from typing import Any

from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from llava_mcore.config.sections.data import Limits
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.encode.record_keys import CLIP_KEYS, SIZE_KEYS
from llava_mcore.data.encode.sample_media import check_fps
from llava_mcore.data.processors.images import ToRgb, decode_image, on_white
from llava_mcore.errors import DataError
from llava_mcore.models.vision.patch_plan import PatchPlan
from llava_mcore.prepare.row_types import BadSample, Reason
from llava_mcore.prepare.sampling import Sampling

USUAL_DETAILS = ("auto", "high")
"""Values of OpenAI's `detail` with which an image is read as usual."""
FEWEST_TOKENS, MOST_TOKENS = 4, 16384
"""Default limits of an image that has options, as in qwen-vl-utils."""


@dataclass(frozen=True, slots=True)
class ImageSizes:
    """The size that an image is resized to: a height and width, or a range of areas. None: not given."""

    height: int | None
    width: int | None
    smallest: int | None
    largest: int | None


@dataclass(frozen=True, slots=True)
class Resizing:
    """How single images are resized for the model to train."""

    factor: int | None
    """Both sides become multiples of this; None: images cannot have a size of their own."""
    reason: str = "give the model with --tokenizer-load-dir: sizes are rounded to its patches"
    """Why not."""
    to_rgb: ToRgb = on_white


NO_RESIZING = Resizing(None)


def resizing_for(assets: Assets | None) -> Resizing:
    """Return how images are resized for a model; None: it is not known."""
    if assets is None:
        return NO_RESIZING
    if not isinstance(assets.plan, PatchPlan):
        return Resizing(None, "the model does not resize images to a range of areas; remove it")
    processor = assets.plan.processing.image_processor
    return Resizing(processor.patch_size * processor.merge_size, "", assets.to_rgb)


def image_sizes(reference: Any) -> ImageSizes | None:
    """Return the sizes beside an image's reference; None if there are none. Raises BadSample for invalid ones."""
    if not isinstance(reference, Mapping):
        return None
    detail = reference.get("detail")
    if detail is not None and detail not in USUAL_DETAILS:
        raise _refused("detail", detail, f"only {' and '.join(USUAL_DETAILS)} are supported; use max_pixels")
    height, width, smallest, largest, total = (_count(reference, key) for key in SIZE_KEYS)
    if total is not None:
        raise _refused("total_pixels", total, "it is an option of videos")
    if (height is None) != (width is None):
        raise _refused("resized_height and resized_width", (height, width), "one of them is missing")
    sizes = ImageSizes(height, width, smallest, largest)
    return None if sizes == ImageSizes(None, None, None, None) else sizes


def resize(data: bytes, sizes: ImageSizes, resizing: Resizing, limits: Limits) -> bytes:
    """Return an image resized as qwen-vl-utils does, as a PNG.

    Raises:
        BadSample: the model's images have no sizes of their own, or these are not allowed.
        DataError: the image cannot be decoded.
    """
    if resizing.factor is None:
        raise BadSample(Reason.SHAPE, f"an image has a size of its own ({_size_text(sizes)}): {resizing.reason}")
    image = decode_image(data, limits.image_pixels, resizing.to_rgb)
    size, area = (image.height, image.width), resizing.factor**2
    smallest, largest = FEWEST_TOKENS * area, MOST_TOKENS * area
    if sizes.height is not None and sizes.width is not None:
        size = (sizes.height, sizes.width)
    else:
        smallest, largest = sizes.smallest or smallest, sizes.largest or largest
    if smallest > largest:
        raise BadSample(Reason.SHAPE, f"an image would have at least {smallest} and at most {largest} pixels")
    try:
        height, width = smart_resize(*size, factor=resizing.factor, min_pixels=smallest, max_pixels=largest)
    except ValueError as error:
        raise BadSample(Reason.SHAPE, f"an image with {_size_text(sizes)}: {error}") from error
    if height * width > limits.image_pixels:
        limit = f"the limit is {limits.image_pixels} (--max-image-pixels)"
        raise BadSample(Reason.TOO_LARGE, f"an image would be resized to {width} x {height} pixels; {limit}")
    buffer = BytesIO()
    image.resize((width, height)).save(buffer, "PNG")
    return buffer.getvalue()


@dataclass(frozen=True, slots=True)
class ClipOptions:
    """Which frames of a video are taken. None: not given.

    `start`, `end`: seconds from the video's first frame.
    """

    fps: float | None = None
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    start: float | None = None
    end: float | None = None

    def sampling(self, usual: Sampling) -> Sampling:
        """Return how a video file with these options is sampled. Raises BadSample if they contradict each other."""
        if self.num_frames is not None:
            if (self.fps, self.min_frames, self.max_frames) != (None, None, None):
                raise _refused("nframes", self.num_frames, "fps, min_frames and max_frames cannot be given with it")
            return replace(usual, min_frames=self.num_frames, max_frames=self.num_frames)
        fps = self.fps or usual.fps
        max_frames = self.max_frames or max(usual.max_frames, self.min_frames or 0)
        least = self.min_frames or min(usual.min_frames, max_frames)
        if least > max_frames:
            raise _refused("min_frames", least, f"max_frames is {max_frames}")
        return replace(usual, fps=fps, min_frames=least, max_frames=max_frames)

    def window(self, times: Sequence[Fraction]) -> slice:
        """Return which frames are between start and end. `times`: ascending seconds. Raises BadSample if none is."""
        first = times[0] + Fraction(self.start or 0)
        last = math.inf if self.end is None else times[0] + Fraction(self.end)
        start, stop = bisect_left(times, first), bisect_right(times, last)
        count = max(0, stop - start)
        if (self.num_frames or 1) > count:
            least, end = self.start or 0, "its end" if self.end is None else self.end
            expected = "none" if self.num_frames is None else f"{count} frames instead of {self.num_frames}"
            raise BadSample(Reason.NO_FRAMES, f"a video has {expected} between second {least} and {end}")
        return slice(start, stop)


WHOLE_CLIP = ClipOptions()


def clip_options(reference: Any) -> ClipOptions:
    """Return the options beside a video's reference. Raises BadSample for invalid ones, and sizes of its frames."""
    if not isinstance(reference, Mapping):
        return WHOLE_CLIP
    for key in SIZE_KEYS:
        if reference.get(key) is not None:
            raise _refused(key, reference[key], "frames of one video cannot be resized; see --video-max-pixels")
    values: dict[str, Any] = {}
    for name, spellings in CLIP_KEYS.items():
        full = [key for key in spellings if reference.get(key) is not None]
        if len({reference[key] for key in full if not isinstance(reference[key], (list, dict))}) > 1:
            raise _refused(" and ".join(full), [reference[key] for key in full], "they differ")
        if full:
            read = _count if name.endswith("frames") else _seconds if name in ("start", "end") else _rate
            values[name] = read(reference, full[0])
    return ClipOptions(**values)


def _count(reference: Mapping[str, Any], key: str) -> int | None:
    value = reference.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value // 1 or value < 1:
        raise _refused(key, value, "not a whole number above 0")
    return int(value)


def _rate(reference: Mapping[str, Any], key: str) -> float | None:
    try:
        return check_fps(reference[key], "a video")
    except DataError as error:
        raise BadSample(Reason.KEY, str(error)) from error


def _seconds(reference: Mapping[str, Any], key: str) -> float:
    value = reference[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise _refused(key, value, "not a number of seconds")
    return float(value)


def _refused(key: str, value: Any, why: str) -> BadSample:
    return BadSample(Reason.KEY, f"{key} is {value!r:.60}: {why}")


def _size_text(sizes: ImageSizes) -> str:
    values = zip(SIZE_KEYS, (sizes.height, sizes.width, sizes.smallest, sizes.largest), strict=False)
    return ", ".join(f"{key} {value}" for key, value in values if value is not None)
