"""Pictures and videos of noise, and the samples that hold them."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from llava_mcore.data.samples import Video


def noise(height: int, width: int, seed: int = 0, kind: str = "PNG", **options: Any) -> bytes:
    """Return a picture of noise."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, kind, **options)
    return buffer.getvalue()


def video(num_frames: int, height: int = 20, width: int = 30, *, fps: float | None = None, seed: int = 0) -> Video:
    """Return a video whose frames differ."""
    return Video(tuple(noise(height, width, seed + i) for i in range(num_frames)), fps)


def as_arrays(clip: Video) -> list[np.ndarray[Any, Any]]:
    """Return the frames as a user gives them to a Hugging Face processor."""
    return [np.asarray(Image.open(io.BytesIO(frame)).convert("RGB")) for frame in clip.frames]
