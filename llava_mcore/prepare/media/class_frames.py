"""The frames of a video that the video processors of transformers' classes keep.

They count frames, as if each were shown equally long, where `select_frames` goes by their times. Numbers are floats, as
in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise

import numpy as np

from llava_mcore.prepare.sampling import Sampling


def class_frames(total: int, rate: float, sampling: Sampling) -> tuple[list[int], float]:
    """Return the indices of the frames that a class keeps, and their number per second.

    Args:
        total: frames of the video, at least one.
        rate: frames per second.
        sampling: with a rule other than "times".
    """
    chosen = RULES[sampling.rule](total, rate, sampling)
    steps = [b - a for a, b in pairwise(chosen)]
    return chosen, rate / (sum(steps) / len(steps)) if steps and any(steps) else min(rate, sampling.fps)


def _qwen2_5_vl(total: int, rate: float, sampling: Sampling) -> list[int]:
    """As many as there are pairs of frames for."""
    limit = min(sampling.max_frames, total) // 2 * 2
    count = min(max(total / rate * sampling.fps, sampling.min_frames), limit, total)
    return _even(total, max(1, math.floor(count / 2) * 2))


def _qwen3_vl(total: int, rate: float, sampling: Sampling) -> list[int]:
    """From the first frame to the last."""
    count = min(max(int(total / rate * sampling.fps), sampling.min_frames), sampling.max_frames, total)
    return [round(x) for x in np.linspace(0, total - 1, count).tolist()]


def _llava_onevision(total: int, rate: float, sampling: Sampling) -> list[int]:
    return _even(total, _count(total, rate, sampling))


def _internvl(total: int, rate: float, sampling: Sampling) -> list[int]:
    """From the middle of each part."""
    count = _count(total, rate, sampling)
    return _even(total, count, shift=total / count / 2)


def _smolvlm(total: int, rate: float, sampling: Sampling) -> list[int]:
    """Without the first and the last second of a long video."""
    seconds = total / rate
    count = max(1, min(round(sampling.fps * seconds), sampling.max_frames))
    start, end = 0, total - 1
    if seconds - 2 > sampling.max_frames * sampling.fps:
        start, end = int(rate), min(int(total - rate), total - 1)
    return sorted(set(np.linspace(start, end, count, dtype=int).tolist()))


RULES: Mapping[str, Callable[[int, float, Sampling], list[int]]] = {
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "llava_onevision": _llava_onevision,
    "internvl": _internvl,
    "smolvlm": _smolvlm,
}


def _count(total: int, rate: float, sampling: Sampling) -> int:
    count = min(max(int(total / rate * sampling.fps), sampling.min_frames), sampling.max_frames, total)
    return max(1, count)


def _even(total: int, count: int, shift: float = 0.0) -> list[int]:
    """Return the first frame of each of so many parts, or one `shift` frames after it."""
    places = shift + total / count * np.arange(count)
    return places.astype(np.float32).astype(int).clip(max=total - 1).tolist()
