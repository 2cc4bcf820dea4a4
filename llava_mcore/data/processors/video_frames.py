"""The frames of a video on their way to the tower, some at a time, so that a long video is never in memory decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from llava_mcore.errors import DataError
from llava_mcore.media.media import MediaTokens, VideoShape

CHUNK_BYTES = 64 << 20
"""Bytes of decoded frames that are resized together."""


def frame_chunks(frames: Sequence[bytes], decode: Callable[[bytes], Tensor], multiple: int | None) -> Iterator[Tensor]:
    """Yield the frames of a video, decoded, as uint8 [frames, 3, h, w].

    Args:
        decode: returns a frame [3, h, w].
        multiple: yields chunks of a multiple of so many frames, except the last one; None: all at once.

    Raises:
        DataError: the frames have several sizes, or `decode` raises it.
    """
    chunk: list[Tensor] = []
    shape, num_bytes = None, 0
    for index, data in enumerate(frames):
        frame = decode(data)
        shape = shape or frame.shape
        if frame.shape != shape:
            sizes = " and ".join(f"{x[2]} x {x[1]}" for x in (shape, frame.shape))
            raise DataError(f"frames 0 and {index} of a video have {sizes} pixels; they must have one size")
        chunk.append(frame)
        num_bytes += frame.nbytes
        if multiple is not None and num_bytes >= CHUNK_BYTES and len(chunk) % multiple == 0:
            yield torch.stack(chunk)
            chunk, num_bytes = [], 0
    if chunk:
        yield torch.stack(chunk)


def rows_of(
    chunks: Iterator[Tensor],
    num_frames: int,
    tokens: MediaTokens,
    process: Callable[[Tensor, MediaTokens], Tensor],
    process_chunk: Callable[[Tensor, VideoShape], Tensor],
) -> Tensor:
    """Return the rows of a video of a number of frames, from its only chunk or from several."""
    first = next(chunks)
    if len(first) == num_frames:
        return process(first, tokens)
    shape = VideoShape(num_frames, *first.shape[-2:])
    return joined((process_chunk(chunk, shape) for chunk in chain([first], chunks)), tokens.num_rows)


def joined(chunks: Iterator[Tensor], num_rows: int) -> Tensor:
    """Return chunks of rows as one tensor. DataError if they are not `num_rows`."""
    first = next(chunks)
    rows = first.new_empty(num_rows, *first.shape[1:])
    start, chunk = 0, first
    while True:
        end = start + len(chunk)
        if end > num_rows:
            break
        rows[start:end] = chunk
        following = next(chunks, None)
        if following is None:
            break
        start, chunk = end, following
    if end != num_rows:
        raise DataError(f"the video processor returns {end} tiles or patches or more, but the model expects {num_rows}")
    return rows


def probe_video(probe: Image.Image, num_frames: int) -> Tensor:
    """Return a video whose frames are an image that moves, uint8 [frames, 3, height, width]."""
    return torch.stack([F.pil_to_tensor(probe).roll(index, -1) for index in range(num_frames)])
