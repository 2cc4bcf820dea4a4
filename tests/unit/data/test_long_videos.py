"""Long videos: their frames are decoded and resized some at a time, to the same bits as all at once."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import pytest
import torch

from llava_mcore.data.encode.assets import Assets, load_assets
from llava_mcore.data.processors import image_processor, video_frames
from llava_mcore.data.samples import MediaSpan, Video
from llava_mcore.errors import DataError
from llava_mcore.media.media import VideoShape
from tests.helpers.tiny_hf import make_onevision
from tests.helpers.tiny_qwen import make_each_kind
from tests.helpers.videos import noise, video

HEIGHT, WIDTH = 60, 100
FRAME_BYTES = 3 * HEIGHT * WIDTH


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return make_each_kind(root) | {"llava_onevision": make_onevision(root / "onevision")}


def span(assets: Assets, clip: Video, **options: Any) -> MediaSpan:
    (tokens,) = assets.plan.video_tokens([VideoShape(len(clip.frames), HEIGHT, WIDTH, clip.fps)])
    return MediaSpan(clip, 0, tokens, **options)


def test_rows_of_chunks_are_those_of_the_whole_video(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """For every class that takes videos, for odd and even numbers of frames, augmented too."""
    resized: list[int] = []

    def counted(*args: Any) -> Any:
        for chunk in video_frames.frame_chunks(*args):
            resized.append(len(chunk))
            yield chunk

    monkeypatch.setattr(image_processor, "frame_chunks", counted)
    for name, folder in folders.items():
        assets = load_assets(folder)
        if assets.plan.video_token_id is None or "<video>" in assets.refused:
            continue
        for num_frames in (16, 17):
            for augment in (None, lambda frame: frame.flip(-1)):
                item = span(assets, video(num_frames, HEIGHT, WIDTH, fps=2.0), augment=augment)
                monkeypatch.setattr(video_frames, "CHUNK_BYTES", 1 << 30)
                resized.clear()
                whole = assets.images.tiles([item])
                assert resized == [num_frames], name
                monkeypatch.setattr(video_frames, "CHUNK_BYTES", 3 * FRAME_BYTES)
                resized.clear()
                assert torch.equal(assets.images.tiles([item]), whole), name
                step = assets.plan.frames_per_step
                assert sum(resized) == num_frames and max(resized) <= 3 + step - 1, (name, resized)


def test_frames_of_several_sizes_are_named_across_chunks(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assets = load_assets(folders["qwen2_5_vl"])
    clip = video(9, HEIGHT, WIDTH)
    item = span(assets, dataclasses.replace(clip, frames=(*clip.frames, noise(WIDTH, HEIGHT))))
    monkeypatch.setattr(video_frames, "CHUNK_BYTES", 1)
    with pytest.raises(DataError, match="frames 0 and 9 of a video have 100 x 60 and 60 x 100 pixels"):
        assets.images.tiles([item])


def test_rows_that_do_not_match_the_tokens() -> None:
    parts = torch.arange(12).view(6, 2)
    assert torch.equal(video_frames.joined(iter(parts.split(4)), 6), parts)
    for expected in (3, 5, 7):
        with pytest.raises(DataError, match=f"but the model expects {expected}"):
            video_frames.joined(iter(parts.split(4)), expected)
