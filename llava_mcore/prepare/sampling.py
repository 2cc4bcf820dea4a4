"""How video files are sampled. Imports nothing heavy: the command line's help gives the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

FrameRule = Literal["times", "qwen2_5_vl", "qwen3_vl", "llava_onevision", "internvl", "smolvlm"]
LEAST_FRAMES: Mapping[FrameRule, int] = {"times": 2, "qwen2_5_vl": 4, "qwen3_vl": 4}
"""Fewest frames of a video by each rule; of the others one."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Which frames of a video file are kept."""

    fps: float = 2.0
    """Frames per second, at most as many as the video has."""
    max_frames: int = 128
    """Most frames of a video; a longer one is sampled at a lower rate."""
    min_frames: int = 2
    """Fewest frames of a video that has as many, at a higher rate if need be: Qwen3-VL takes no video of one frame."""
    rule: FrameRule = "times"
    """Those that are shown at evenly spaced times, or those that a class of transformers keeps (`class_frames`)."""

    @classmethod
    def by_rule(cls, rule: FrameRule, fps: float, max_frames: int) -> Sampling:
        """Return the sampling of a rule, with its fewest frames."""
        return cls(fps, max_frames, LEAST_FRAMES.get(rule, 1), rule)
