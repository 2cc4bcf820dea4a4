"""Frames that transformers' video processors keep of a video file."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, get_args

import pytest
from transformers import (
    InternVLVideoProcessor,
    LlavaOnevisionVideoProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLVideoProcessor,
    SmolVLMVideoProcessor,
)
from transformers.video_utils import VideoMetadata

from llava_mcore.prepare.media.class_frames import RULES, class_frames
from llava_mcore.prepare.media.video_files import select_frames
from llava_mcore.prepare.sampling import FrameRule, Sampling

MOST = 40
LENGTHS = (
    *((1, 5, 0), (3, 25, 0), (7, 30, 11), (19, 24, 1), (20, 30, 0), (61, 25, 7), (81, 24, 5), (120, 10, 3)),
    *((29, 24, 0), (600, 50, 9)),  # in fp64, some frames of the first would be others
)
FRAMES_AND_SECONDS = [(seconds * rate + more, seconds + more / rate) for seconds, rate, more in LENGTHS]


def theirs(rule: FrameRule, metadata: VideoMetadata, fps: float) -> list[int]:
    """Return the frames that the class of a rule keeps; the number is ours where the class has no limit of its own."""
    number = max(1, min(int(metadata.total_num_frames / metadata.fps * fps), MOST))
    if rule == "qwen2_5_vl":
        return Qwen2VLVideoProcessor(max_frames=MOST).sample_frames(metadata, fps=fps).tolist()
    if rule == "qwen3_vl":
        return Qwen3VLVideoProcessor(max_frames=MOST).sample_frames(metadata, fps=fps).tolist()
    if rule == "smolvlm":
        sampling = {"max_frames": MOST, "fps": fps, "video_size": {"longest_edge": 64}}
        processor = SmolVLMVideoProcessor(video_sampling=sampling)
        return processor.sample_frames(metadata).tolist()
    chosen: Any = {"llava_onevision": LlavaOnevisionVideoProcessor, "internvl": InternVLVideoProcessor}[rule]
    return chosen().sample_frames(metadata, num_frames=number).tolist()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fps", [0.5, 2.0, 3.7])
def test_frames_are_those_of_transformers(rule: FrameRule, fps: float) -> None:
    for total, seconds in FRAMES_AND_SECONDS:
        rate = total / seconds
        metadata = VideoMetadata(total_num_frames=total, fps=rate, duration=seconds)
        if rule == "qwen2_5_vl" and total < 4:  # which it cannot pair
            continue
        chosen, found_rate = class_frames(total, rate, Sampling.by_rule(rule, fps, MOST))
        assert chosen == theirs(rule, metadata, fps), (total, seconds)
        times = [index / rate for index in chosen]
        if len(times) > 2:  # the rate is that of the kept frames
            assert (times[-1] - times[0]) / (len(times) - 1) == pytest.approx(1 / found_rate)


def test_every_rule_is_a_flag_and_the_usual_one_goes_by_times() -> None:
    assert {"times", *RULES} == set(get_args(FrameRule))
    # A video whose second half is slower: half of the frames by number, a quarter by time.
    times = [Fraction(i, 8) for i in range(8)] + [Fraction(1) + Fraction(3 * i, 8) for i in range(8)]
    given = (times, Fraction(3, 8))
    assert select_frames(*given, Sampling.by_rule("times", 1.0, 128))[0] == [0, 8, 10, 13]
    assert select_frames(*given, Sampling.by_rule("qwen2_5_vl", 1.0, 128))[0] == [0, 4, 8, 12]
    assert select_frames([Fraction(0)], Fraction(1), Sampling.by_rule("internvl", 1.0, 4)) == ([0], 1.0)
