"""Mllama, whose decoder attends to images: tokens, tiles, logits, gradients and answers are transformers'."""

from __future__ import annotations

import random
from pathlib import Path

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import pytest
import torch
from safetensors.torch import load_file

from llava_mcore.build.tiny.classes import write_tiny
from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.media.batch_fields import ASPECT_RATIO_IDS, PIXEL_SCALE, PIXEL_VALUES, normalize
from llava_mcore.models.language.cross_attention import seen_features
from tests.helpers.class_checks import assert_logits_and_gradients, batch_of
from tests.helpers.tiny_mllama import CONVERSATIONS, conversation, theirs_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mllama") / "hf"
    write_tiny("mllama", path, 0)
    return path


def test_files_are_written_back_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    import_hf(folder, tmp_path / "m", tensor_parallel=2, verify=True)
    export_hf(tmp_path / "m", tmp_path / "out", tensor_parallel=4, verify=True)
    written, read = load_file(tmp_path / "out" / "model.safetensors"), load_file(folder / "model.safetensors")
    assert written.keys() == read.keys() and all(torch.equal(written[x], read[x]) for x in read)
    assert (
        read["language_model.model.embed_tokens.weight"].shape[0] == 8 + read["language_model.lm_head.weight"].shape[0]
    )


def test_tokens_tiles_and_grids_are_the_processors(folder: Path) -> None:
    """Conversations of one to three images of 60 sizes."""
    assets, choose = load_assets(folder), random.Random(0)
    for number in range(20):
        sizes = [(choose.randint(1, 130), choose.randint(1, 130)) for _ in range(1 + number % 3)]
        sample = conversation("".join(f"Image {i}: <image>\n" for i in range(len(sizes))), *sizes)
        batch, theirs = batch_of(assets, [sample], packed=False), theirs_of(folder, sample)
        ids = theirs["input_ids"][0]
        assert batch.input_ids[0, : len(ids)].tolist() == ids.tolist(), sizes
        assert batch.media[ASPECT_RATIO_IDS].tolist() == theirs["aspect_ratio_ids"][0].tolist(), sizes
        own = theirs["pixel_values"][0][theirs["aspect_ratio_mask"][0].bool()]
        assert torch.equal(normalize(batch.media[PIXEL_VALUES], batch.media[PIXEL_SCALE]), own), sizes
        assert batch.media[PIXEL_VALUES].dtype == torch.uint8


def test_what_tokens_see_is_the_processors_mask() -> None:
    """Two samples of 8 and 6 tokens: images side by side, one after text; then none."""
    real = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])
    seen = seen_features(torch.tensor([2, 3, 6]), real, torch.tensor([0, 8, 14]), 14)
    features, none, reads = seen[:, :9].unflatten(1, (3, 3)), seen[:, 9], seen[:, 10]
    assert features[:2].all() and not reads[:2].any(), "before the first image all is read"
    assert features[2].tolist() == [real[0].tolist(), [False] * 3, [False] * 3]
    assert all(torch.equal(row[:2], real[:2]) and not row[2].any() for row in features[3:6])
    assert all(row[2].all() and not row[:2].any() for row in features[6:8]) and reads[2:8].all()
    assert none.tolist() == [False] * 8 + [True] * 6 and not features[8:].any() and not reads[8:].any()


def test_logits_and_gradients_are_hugging_faces(folder: Path, tmp_path: Path) -> None:
    """Images of several grids and text alone in one pack: every conversation as transformers computes it alone."""
    assert_logits_and_gradients(folder, CONVERSATIONS, theirs_of, tmp_path / "m")
