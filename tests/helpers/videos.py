"""Images and videos of noise, and the samples that hold them."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from llava_mcore.data.samples import Video


def noise(height: int, width: int, seed: int = 0, kind: str = "PNG", **options: Any) -> bytes:
    """Return an image of noise."""
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


def video_file(path: Path, *, num_frames: int = 50, codec: str = "libx264") -> Path:
    """Write a video of 25 frames a second whose frame i is of the grey 5 * i; H.264 has frames out of order."""
    import av  # of the extra `video`, which machines with GPUs may lack

    fps, size = 25, (64, 48)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for number in range(num_frames):
            values = np.full((size[1], size[0], 3), 5 * number, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(values, format="rgb24")))
        container.mux(stream.encode())
    return path


def greys(frames: Iterable[bytes]) -> list[int]:
    """Return which frames of `video_file` some frames are."""
    return [round(float(np.asarray(Image.open(io.BytesIO(frame))).mean()) / 5) for frame in frames]


def turned(path: Path, degrees: int) -> Path:
    """Rewrite the display matrix of an mp4, as a camera does that was held upright (-90) or upside down (180)."""
    data = path.read_bytes()
    start = data.index(b"tkhd") + 4 + 4 + 20 + 8 + 8  # version and flags; times, ids, duration; reserved; layer …
    one, zero = struct.pack(">i", 0x10000), struct.pack(">i", 0)
    minus = struct.pack(">i", -0x10000)
    rows = {
        -90: (zero, one, zero, minus, zero, zero),
        90: (zero, minus, zero, one, zero, zero),
        180: (minus, zero, zero, zero, minus, zero),
    }[degrees]
    matrix = b"".join(rows) + zero + zero + struct.pack(">i", 0x40000000)
    path.write_bytes(data[:start] + matrix + data[start + 36 :])
    return path


def moving_video(
    path: Path,
    num_frames: int,
    *,
    codec: str = "libx264",
    options: dict[str, str] | None = None,
    stamps: Iterable[int] | None = None,
    size: tuple[int, int] = (64, 48),
) -> Path:
    """Write a video of moving noise, of which a decoder needs the frames before to show one.

    Args:
        stamps: of each frame in 1/25 seconds, for frames that are not shown equally long.
    """
    import av

    values = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    times = range(num_frames) if stamps is None else list(stamps)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=25, options=options or {})
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for number, stamp in zip(range(num_frames), times, strict=True):
            shown = np.roll(values, (number, 3 * number), (0, 1)) // 2 + np.uint8(number % 100)
            frame = av.VideoFrame.from_ndarray(shown, format="rgb24")
            frame.pts = stamp
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path
