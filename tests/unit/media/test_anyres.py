"""Images cut into grids: what the loader expands is what Hugging Face's processor expands and its model makes."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import numpy as np
import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaNextConfig,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaOnevisionConfig,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    PretrainedConfig,
    SiglipVisionConfig,
)
from transformers.models.llava_next.modeling_llava_next import LlavaNextModel
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel

from llava_mcore.data.encode.assets import load_assets
from llava_mcore.errors import ConversionError
from llava_mcore.media.batch_fields import (
    FEATURE_POSITIONS,
    FEATURE_ROWS,
    NEWLINE_POSITIONS,
    RESIZED_POSITIONS,
    RESIZED_ROWS,
    RESIZED_WEIGHTS,
)
from llava_mcore.media.media import MediaTokens, Size
from llava_mcore.models.architectures.registry import architecture_of
from tests.helpers import class_tokens
from tests.helpers.cases import PICTURE_SIZES, media_plan
from tests.helpers.class_tokens import assert_same_ids, assert_same_tiles
from tests.helpers.tiny_hf import make_hf_llava, make_onevision

NEWLINE = -1.0
NUM_SIZES = [1_000, pytest.param(4_000, marks=pytest.mark.long)]


def llava_next() -> PretrainedConfig:
    """LLaVA-1.6's geometry."""
    return LlavaNextConfig(
        vision_config=CLIPVisionConfig(image_size=336, patch_size=14), text_config=LlamaConfig(), image_token_id=4
    )


def llava_onevision() -> PretrainedConfig:
    """LLaVA-OneVision's geometry."""
    vision = SiglipVisionConfig(image_size=384, patch_size=14)
    return LlavaOnevisionConfig(
        vision_config=vision,
        text_config=LlamaConfig(),
        image_token_id=4,
        vision_feature_select_strategy="full",
    )


def random_sizes(number: int, seed: int) -> Iterator[Size]:
    """Heights and widths, small and large ones equally often, of every proportion."""
    draw = np.random.default_rng(seed)
    for _ in range(number):
        height, width = np.exp(draw.uniform(np.log(2), np.log(4000), 2)).astype(int)
        yield int(height), int(width)


def sequence(tokens: MediaTokens) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What stands at each token: the number of the feature, a mean of numbers where it is resized, or NEWLINE."""
    values, found = tokens.values, np.full(len(tokens), np.nan)
    found[values[FEATURE_POSITIONS]] = values[FEATURE_ROWS]
    found[values[NEWLINE_POSITIONS]] = NEWLINE
    if RESIZED_ROWS in values:
        found[values[RESIZED_POSITIONS]] = (values[RESIZED_ROWS] * values[RESIZED_WEIGHTS].astype(np.float64)).sum(-1)
    return found


def model_makes(kind: Any, hf: PretrainedConfig, size: Size, num_tiles: int, n: int) -> np.ndarray[Any, Any]:
    """What Hugging Face's model puts together of features that are their own numbers."""
    features = torch.arange(num_tiles * n, dtype=torch.float32).view(num_tiles, n, 1)
    more = {} if "vision_aspect_ratio" in hf.to_dict() else {"vision_feature_select_strategy": "default"}
    model = SimpleNamespace(config=hf)
    newline = torch.tensor([NEWLINE])
    packed, _ = kind.pack_image_features(model, [features], [list(size)], image_newline=newline, **more)
    return packed[0][:, 0].numpy()


CASES = [(llava_next, LlavaNextModel, 0), (llava_onevision, LlavaOnevisionModel, 1)]


@pytest.mark.parametrize("number", NUM_SIZES)
@pytest.mark.parametrize(("config", "model", "seed"), CASES)
def test_features_are_where_hugging_faces_model_puts_them(config: Any, model: Any, seed: int, number: int) -> None:
    hf = config()
    plan, n = media_plan(hf), architecture_of(hf).features_per_tile(hf)
    expected_tokens = expands(hf)
    resized = 0
    for size in random_sizes(number, seed):
        (tokens,) = plan.tokens([size])
        assert len(tokens) == expected_tokens(size), size
        assert tokens.num_features == n * tokens.num_rows and (tokens.ids == 4).all()
        theirs = model_makes(model, hf, size, tokens.num_rows, n)
        resized += bool(len(tokens.values.get(RESIZED_ROWS, ())))
        np.testing.assert_allclose(sequence(tokens), theirs, rtol=1e-6, atol=1e-2, err_msg=str(size))
    assert bool(resized) == (model is LlavaOnevisionModel)


PICTURES_OF = {"llava": 3, "llava_next": 1, "llava_onevision": 1}
"""Images of each conversation. Of several that are cut into grids, transformers fills up the tiles to one number."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("anyres")
    make_onevision(root / "llava_onevision")
    for name in ("llava", "llava_next"):
        make_hf_llava(root / name, architecture=name)
    return {name: root / name for name in PICTURES_OF}


@pytest.mark.parametrize("number", NUM_SIZES)
@pytest.mark.parametrize("name", PICTURES_OF)
def test_the_whole_processor_makes_the_same_tokens(folders: dict[str, Path], name: str, number: int) -> None:
    assert_same_ids(
        folders[name], load_assets(folders[name]), class_tokens.random_sizes(number, 400), PICTURES_OF[name]
    )


@pytest.mark.parametrize("name", PICTURES_OF)
def test_the_tiles_are_the_processors(folders: dict[str, Path], name: str) -> None:
    assert_same_tiles(folders[name], load_assets(folders[name]), [*PICTURE_SIZES, *class_tokens.random_sizes(40, 400)])


def expands(hf: PretrainedConfig) -> Any:
    """Return the number of tokens that Hugging Face's processor expands an image of a size to."""
    side = hf.vision_config.image_size
    if isinstance(hf, LlavaOnevisionConfig):
        images = LlavaOnevisionImageProcessor(image_grid_pinpoints=hf.image_grid_pinpoints)
        processor: Any = object.__new__(LlavaOnevisionProcessor)
        processor.num_image_tokens, processor.vision_aspect_ratio = 729, hf.vision_aspect_ratio
    else:
        images = LlavaNextImageProcessor(image_grid_pinpoints=hf.image_grid_pinpoints)
        processor = object.__new__(LlavaNextProcessor)
        processor.patch_size, processor.num_additional_image_tokens = 14, 1
    processor.image_processor = images
    drops = 1 if hf.vision_feature_select_strategy == "default" else 0
    return lambda size: processor._get_number_of_features(*size, side, side) - drops


def test_several_pictures_of_a_conversation() -> None:
    """OneVision gives each of several images one tile, LLaVA-NeXT its own tiles."""
    hf = llava_onevision()
    plan = media_plan(hf)
    both = plan.tokens([(100, 900), (900, 100)])
    assert [(len(x), x.num_rows) for x in both] == [(730, 1)] * 2 and sequence(both[0]).tolist() == [*range(729), -1]
    hf = llava_next()
    plan = media_plan(hf)
    assert plan.tokens([(100, 900), (900, 100)]) == [plan.tokens([x])[0] for x in ((100, 900), (900, 100))]


def test_a_plan_travels_to_other_processes() -> None:
    plan = media_plan(llava_onevision())
    (mine,), (other,) = plan.tokens([(70, 90)]), pickle.loads(pickle.dumps(plan)).tokens([(70, 90)])
    assert np.array_equal(mine.ids, other.ids) and np.array_equal(sequence(mine), sequence(other))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_feature_select_strategy": "full"}, r"'full' leaves 577 features of a tile of 576 patches.*'default'"),
        ({"image_grid_pinpoints": [[336, 500]]}, r"multiples of the tower's 336 pixels, found \[\(336, 500\)\]"),
        ({"image_grid_pinpoints": []}, "found none"),
    ],
)
def test_settings_that_the_tower_cannot_take(change: dict[str, Any], message: str) -> None:
    hf = llava_next()
    for name, value in change.items():
        setattr(hf, name, value)
    with pytest.raises(ConversionError, match=message):
        media_plan(hf)


def test_only_one_way_to_cut_is_known() -> None:
    hf = llava_onevision()
    hf.vision_aspect_ratio = "pad"
    with pytest.raises(ConversionError, match="vision_aspect_ratio = 'pad': expected 'anyres_max_9'"):
        media_plan(hf)
