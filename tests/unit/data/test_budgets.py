"""The budgets of a pack beside the smallest and the largest image or audio clip, for every kind of plan."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llava_mcore.cli.check import main as check
from llava_mcore.config.sections.data import DataConfig, PixelRange
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.data.loader.budgets import check_budgets, media_budgets, warnings_of_large_media
from llava_mcore.errors import ConfigError
from llava_mcore.media.clip_plan import AudioPlan
from llava_mcore.media.media import MediaBudget
from tests.helpers.bad_data_makers import good
from tests.helpers.tiny_audio import make_hf_audio
from tests.helpers.tiny_classes import make_hf_idefics3, make_hf_internvl
from tests.helpers.tiny_hf import make_hf_llava, make_onevision
from tests.helpers.tiny_idefics2 import make_hf_idefics2
from tests.helpers.tiny_qwen import PATCH, make_hf_qwen
from tests.unit.data.test_data_loader import open_loader

AREA = (2 * PATCH) ** 2
"""Pixels of a token of the tiny Qwen-VL, whose images have 4 to 64 tokens."""
MAKERS: dict[str, Callable[[Path], Any]] = {
    "llava": make_hf_llava,
    "llava_next": lambda folder: make_hf_llava(folder, architecture="llava_next"),
    "llava_onevision": make_onevision,
    "internvl": make_hf_internvl,
    "idefics3": make_hf_idefics3,
    "idefics2": make_hf_idefics2,
    "qwen2_5_vl": lambda folder: make_hf_qwen(folder, "qwen2_5_vl"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("budgets")
    for name, make in MAKERS.items():
        make(root / name)
    return {name: root / name for name in MAKERS}


@pytest.mark.parametrize("name", MAKERS)
def test_pictures_are_between_the_smallest_and_the_largest(folders: dict[str, Path], name: str) -> None:
    assets, choose = load_assets(folders[name]), random.Random(0)
    smallest, largest = media_budgets(assets)
    assert largest is not None
    # As long as eight times their width: longer ones of Qwen-VL may have more, for a side has at least one token.
    sizes = [(choose.randint(13, 400), choose.randint(50, 104)) for _ in range(400)] + [(400, 400), (28, 28)]
    found = [assets.plan.tokens([size])[0] for size in sizes]
    assert all(smallest.tokens <= len(item) <= largest.tokens for item in found)
    assert all(smallest.patches <= item.num_patches <= largest.patches for item in found)
    if name != "llava_onevision":  # a grid that is just not resized has up to a fifth more than any seen here
        assert max(map(len, found)) == largest.tokens
    assert max(item.num_patches for item in found) == largest.patches
    assert min(item.num_patches for item in found) <= 3 * smallest.patches


def test_audio_clips_are_between_the_smallest_and_the_largest(tmp_path: Path) -> None:
    make_hf_audio(tmp_path)
    assets = load_assets(tmp_path)
    smallest, largest = media_budgets(assets)
    assert isinstance(assets.plan, AudioPlan)
    (longest,) = assets.plan.audio_tokens([assets.plan.most_samples])
    assert (smallest, largest) == (MediaBudget(1, 2), MediaBudget(len(longest), longest.num_patches))
    (warning,) = warnings_of_large_media(DataConfig(seq_length=len(longest)), assets)
    length = len(longest)
    assert warning.startswith(f"audio clips may have up to {length} tokens, but data.seq_length is {length}: ")


def test_what_fits_is_neither_refused_nor_warned_of(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        assets = load_assets(folder)
        _, largest = media_budgets(assets)
        assert largest is not None
        data = DataConfig(seq_length=largest.tokens + 1, max_media_tokens=largest.patches)
        check_budgets(data, assets)
        assert warnings_of_large_media(data, assets) == []
        for less in ({"seq_length": largest.tokens}, {"max_media_tokens": largest.patches - 1}):
            assert warnings_of_large_media(data.model_copy(update=less), assets) or largest == assets.plan.smallest


def test_the_advice_is_enough(folders: dict[str, Path]) -> None:
    """Images that are resized to the area of the message fit, those of one token more would not."""
    folder = folders["qwen2_5_vl"]
    data = DataConfig(seq_length=41, max_media_tokens=120, on_too_long="truncate")
    assert warnings_of_large_media(data, load_assets(folder)) == [
        "with --max-pixels 9216 images may have up to 64 tokens, but data.seq_length is 41; and 256 patches of "
        "images and frames, but data.max_media_tokens is 120: samples are truncated before larger ones; set "
        f"--max-pixels to at most {30 * AREA}, or raise --seq-length or data.max_media_tokens"
    ]
    for budgets, fitting in (({}, 40), ({"max_media_tokens": 120}, 30)):
        data = DataConfig(seq_length=41, **budgets)
        for most in (fitting, fitting + 1):
            assets = load_assets(folder, pixels=PixelRange(largest=most * AREA))
            assert bool(warnings_of_large_media(data, assets)) == (most > fitting)


def test_a_minimum_that_does_not_fit_is_refused(folders: dict[str, Path]) -> None:
    assets = load_assets(folders["qwen2_5_vl"], pixels=PixelRange(20 * AREA, 40 * AREA))
    check_budgets(DataConfig(seq_length=21, max_media_tokens=80), assets)
    with pytest.raises(ConfigError, match=r"has at least 20 tokens: set .*, or lower --min-pixels \(2880\)"):
        check_budgets(DataConfig(seq_length=20), assets)
    with pytest.raises(ConfigError, match="is 79, but the smallest image has 80 patches"):
        check_budgets(DataConfig(seq_length=21, max_media_tokens=79), assets)


def test_training_and_check_warn(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folders["qwen2_5_vl"]
    said = "with --max-pixels 9216 images may have up to 64 tokens, but data.seq_length is 60: samples with"
    with caplog.at_level(logging.WARNING):
        open_loader(good(tmp_path / "data"), load_assets(folder), seq_length=60).close()
        assert caplog.text.count(said) == 1
        open_loader(tmp_path / "data", load_assets(folder), seq_length=65).close()
        assert caplog.text.count(said) == 1
    check(["--data-path", str(tmp_path / "data"), "--tokenizer-load-dir", str(folder), "--seq-length", "60"])
    assert f"\nnote: {said} larger ones are skipped; set --max-pixels" in capsys.readouterr().out
