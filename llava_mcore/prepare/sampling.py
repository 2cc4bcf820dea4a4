"""How video files are sampled. Imports nothing heavy: the command line's help gives the defaults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sampling:
    """Which frames of a video file are kept."""

    fps: float = 2.0
    """Frames per second, at most as many as the video has."""
    max_frames: int = 128
    """Most frames of a video; a longer one is sampled at a lower rate."""
    min_frames: int = 2
    """Fewest frames of a video that has as many, at a higher rate if need be: Qwen3-VL takes no video of one frame."""
