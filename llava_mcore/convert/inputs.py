"""Converts the output of a Hugging Face processor into inputs of our model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig, ProcessorMixin

from llava_mcore.errors import ConversionError
from llava_mcore.media.batch_fields import NO_SCALE, PIXEL_SCALE, PIXEL_VALUES
from llava_mcore.media.clip_plan import AudioPlan
from llava_mcore.media.media import (
    MediaPlan,
    MediaTokens,
    Processing,
    Size,
    VideoShape,
    index_values,
    position_ids,
)
from llava_mcore.models.architectures.base import Architecture
from llava_mcore.models.architectures.registry import (
    architecture_of,
    classes_that_take_audios,
    classes_that_take_videos,
)
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.parallel.batch import longest_media

Videos = Sequence[Sequence[VideoShape | tuple[int, int, int]]]
"""For each row: number of frames, their height and width in pixels."""
Audios = Sequence[Sequence[int]]
"""For each row: the number of samples of its audio clips."""


def model_inputs(
    model: VisionLanguageModel,
    processor: ProcessorMixin,
    inputs: Mapping[str, Tensor],
    sizes: Sequence[Sequence[Size]],
    videos: Videos | None = None,
    audios: Audios | None = None,
) -> dict[str, Tensor | dict[str, Tensor] | int]:
    """Return the arguments of a forward pass for the output of the folder's own processor.

    Args:
        processor: the processor of the Hugging Face folder.
        inputs: its output, with input_ids [b, s].
        sizes: height and width in pixels of the images of each row.
        videos: number of frames, height and width in pixels of the videos of each row; None without any.
        audios: number of samples of the audio clips of each row, as the processor was given them; None without any.

    Raises:
        ConversionError: an image, video or audio clip is not expanded to the tokens that the model expects, or the
            class does not take it.
    """
    ids = inputs["input_ids"]
    media, positions = processed_media(model.hf, processor, inputs, sizes, videos, audios)
    return {
        "input_ids": ids,
        "position_ids": positions,
        "media": media,
        "max_media_seqlen": longest_media(media),
    }


def processed_media(
    hf: PretrainedConfig,
    processor: ProcessorMixin,
    inputs: Mapping[str, Tensor],
    sizes: Sequence[Sequence[Size]],
    videos: Videos | None = None,
    audios: Audios | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the media of a forward pass, which are the architecture's fields, and its position_ids.

    All images come first, then all videos, as the processor returns them. Arguments and errors: see `model_inputs`.
    """
    architecture = architecture_of(hf)
    if architecture.takes_audios:
        return _processed_audios(hf, processor, inputs, sizes, videos, audios)
    _refuse(architecture, "audio clips", audios, classes_that_take_audios())
    of_videos = processor.video_processor if architecture.takes_videos else None
    plan = architecture.media(hf, Processing(processor.tokenizer, processor.image_processor, {}, of_videos))
    images = [plan.tokens(row) for row in sizes]
    clips = _video_tokens(architecture, plan, [()] * len(images) if videos is None else videos)
    row_shape = architecture.pixel_shape(hf)
    pixels = plan.processed_pixels(inputs, images, row_shape) if any(images) else torch.empty(0, *row_shape)
    if any(clips):
        pixel_values = inputs["pixel_values_videos"]
        parts = [pixel_values] if pixel_values[0].ndim < pixels.ndim else pixel_values
        pixels = torch.cat([pixels, *parts])
    return _placed(plan, inputs["input_ids"].numpy(), {"image": images, "video": clips}, pixels)


def _processed_audios(
    hf: PretrainedConfig,
    processor: ProcessorMixin,
    inputs: Mapping[str, Tensor],
    sizes: Sequence[Sequence[Size]],
    videos: Videos | None,
    audios: Audios | None,
) -> tuple[dict[str, Tensor], Tensor]:
    """As `processed_media`, of a class that takes audio: its processor pads every clip, here all are packed."""
    architecture = architecture_of(hf)
    _refuse(architecture, "images", sizes, ())
    _refuse(architecture, "videos", videos, classes_that_take_videos())
    plan = AudioPlan(hf, processor.feature_extractor)
    clips = [plan.audio_tokens(row) for row in (audios or [()] * len(inputs["input_ids"]))]
    flat = [item for row in clips for item in row]
    padded = inputs["input_features"] if flat else ()
    rows = [plan.rows_of(features, item) for features, item in zip(padded, flat, strict=True)]
    frames = torch.cat(rows) if rows else torch.empty(0, *architecture.pixel_shape(hf))
    return _placed(plan, inputs["input_ids"].numpy(), {"audio clip": clips}, frames)


def _refuse(
    architecture: Architecture, media_name: str, rows: Sequence[Sequence[object]] | None, known: Sequence[str]
) -> None:
    """Raise ConversionError if some row has media that the class does not take. `known`: classes that do."""
    if any(rows or ()):
        others = f"; classes that do: {', '.join(known)}" if known else ""
        raise ConversionError(f"{architecture.model_class.__name__} takes no {media_name}{others}")


def _placed(
    plan: MediaPlan, rows: NDArray[np.int64], media: Mapping[str, Sequence[Sequence[MediaTokens]]], pixels: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the fields and the positions of media in rows of ids [b, s].

    Args:
        media: by what they are, those of each row, in the order of their pixels.
        pixels: rows of PIXEL_VALUES of all media.
    """
    items, starts = list[MediaTokens](), list[int]()
    by_row: list[list[tuple[int, MediaTokens]]] = [[] for _ in rows]
    for media_name, tokens in media.items():
        for index, (row, of_row) in enumerate(zip(rows, tokens, strict=True)):
            begins = list(_starts(row, of_row, media_name))
            by_row[index] += zip(begins, of_row, strict=True)
            items += of_row
            starts += [index * rows.shape[1] + start for start in begins]
    pixel_fields = {PIXEL_VALUES: pixels, PIXEL_SCALE: NO_SCALE}
    return pixel_fields | index_values(plan.fields, items, starts), _positions(by_row, rows.shape[1], plan.num_axes)


def _positions(rows: list[list[tuple[int, MediaTokens]]], length: int, num_axes: int) -> Tensor:
    """Return position_ids [b, s], or [axes, b, s], of rows of so many tokens with images and videos at starts."""
    by_row_positions = []
    for row in rows:
        row.sort(key=lambda item: item[0])
        by_row_positions.append(position_ids(length, [x for _, x in row], [start for start, _ in row], num_axes))
    positions = torch.from_numpy(np.stack(by_row_positions, axis=1))
    return positions[0] if num_axes == 1 else positions


def _video_tokens(architecture: Architecture, plan: MediaPlan, videos: Videos) -> list[list[MediaTokens]]:
    shapes = [[VideoShape(*video) for video in row] for row in videos]
    if plan.video_token_id is None:
        _refuse(architecture, "videos", shapes, classes_that_take_videos())
    return [plan.video_tokens(row) if row else [] for row in shapes]


def _starts(ids: NDArray[np.int64], items: Sequence[MediaTokens], media_name: str) -> Iterator[int]:
    """Yield the position at which the tokens of each image (video, audio clip) start in a row."""
    start = 0
    for index, item in enumerate(items):
        last = len(ids) - len(item)
        while start <= last and not np.array_equal(ids[start : start + len(item)], item.ids):
            start += 1
        if start > last:
            raise ConversionError(
                f"{media_name} {index} is not expanded to the {len(item)} tokens that the model's config.json makes of "
                "its size; correct the processor's settings"
            )
        yield start
        start += len(item)
