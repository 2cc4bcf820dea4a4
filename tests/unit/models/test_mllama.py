"""Mllama, whose decoder attends to images: tokens, tiles, logits, gradients and answers are transformers'."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import pytest
import torch
from safetensors.torch import load_file

from llava_mcore.build.tiny.classes import write_tiny
from llava_mcore.cli import import_hf as import_command
from llava_mcore.cli import inspect_folder
from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.errors import LlavaMcoreError
from llava_mcore.media.batch_fields import ASPECT_RATIO_IDS, PIXEL_SCALE, PIXEL_VALUES, MediaWork, normalize
from llava_mcore.models.language.cross_attention import seen_features
from tests.helpers.class_checks import (
    assert_logits_and_gradients,
    assert_torch_counts_the_same,
    batch_of,
    edited,
)
from tests.helpers.photos import CHINA
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


def test_check_compares_the_output_of_every_module(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--hf-dir", str(folder), "--tp", "2", "--workers", "1"]
    assert import_command.main([*flags, "--megatron-dir", str(tmp_path / "m"), "--verify", "--logits", str(CHINA)]) == 0
    assert f"outputs of {6 + 5 * 9 + 4 * 10} modules compared)" in capsys.readouterr().out
    assert import_command.main([*flags, "--megatron-dir", str(tmp_path / "stages"), "--pp", "2"]) == 2
    assert "2 layers of" in capsys.readouterr().err


def test_inspect_and_flops(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """torch counts our FLOPs over transformers' model, and attention to images, which we leave out."""
    assert inspect_folder.main([str(folder)]) == 0
    out = capsys.readouterr().out
    assert "up to 4 tiles of 28 x 28 pixels in patches of 14" in out
    sample = conversation("What is this? <image>", (60, 50))
    inputs = theirs_of(folder, sample)
    tokens, features, width = inputs["input_ids"].shape[1], 4 * 5, 64
    work = MediaWork(num_patches=4 * 4, num_sequences=1)
    scores = 2 * 4 * tokens * features * width  # of two layers
    mask = 2 * (4 * 8) ** 2  # which transformers makes by a product
    assert_torch_counts_the_same(folder, dict(inputs), work, not_counted=3 * scores + mask)


VISION, TEXT = "vision_config", "text_config"


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("config.json", lambda c: c[TEXT].update(cross_attention_layers=[1, 4]), "there are layers 0 to 3"),
        ("config.json", lambda c: c[TEXT].update(dropout=0.1), "text_config.dropout = 0.1 is not supported"),
        ("config.json", lambda c: c[VISION].update(intermediate_layers_indices=[0, 3]), "there are layers 0 to 2"),
        ("config.json", lambda c: c[VISION].update(vision_output_dim=128), "3 outputs of 64 are 192"),
        ("config.json", lambda c: c[VISION].update(num_global_layers=0), "must be at least 1|expected a whole number"),
        ("config.json", lambda c: c[VISION].update(supported_aspect_ratios=[[1, 1]]), "numbers all grids|is \\("),
        (
            "processor_config.json",
            lambda c: c["image_processor"].update(max_image_tiles=3),
            "makes up to 3 tiles",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused(folder: Path, tmp_path: Path, file: str, change: Any, said: str) -> None:
    changed = edited(folder, tmp_path / "hf", file, change)
    with pytest.raises(LlavaMcoreError, match=said):
        import_hf(changed, tmp_path / "m")
        load_assets(changed)
