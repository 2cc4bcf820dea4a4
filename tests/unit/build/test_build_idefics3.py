"""build --architecture idefics3 and smolvlm: any SigLIP and language model, images split into tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoProcessor,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    SiglipVisionModel,
    SmolVLMForConditionalGeneration,
    SmolVLMProcessor,
)

from llava_mcore.cli import import_hf
from llava_mcore.cli.build import main
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.data.samples import Conversation, Turn
from llava_mcore.errors import ConfigError
from llava_mcore.models.vision.families.idefics import is_plain_grid
from tests.helpers.build_checks import assert_goes_back
from tests.helpers.build_parts import VOCAB, load, tensors_of
from tests.helpers.class_checks import assert_logits_and_gradients
from tests.helpers.class_tokens import assert_same_ids
from tests.helpers.photos import CHINA
from tests.helpers.tiny_idefics2 import theirs_of
from tests.helpers.videos import noise

pytest_plugins = ("tests.helpers.build_fixtures",)

CLASSES: dict[str, tuple[Any, Any]] = {
    "idefics3": (Idefics3ForConditionalGeneration, Idefics3Processor),
    "smolvlm": (SmolVLMForConditionalGeneration, SmolVLMProcessor),
}
MARKS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<row_1_col_1>", "<row_6_col_6>")
SIZES = [(131, 57), (40, 300), (60, 60), (7, 9), (500, 333), (28, 29)]
by_class = pytest.mark.parametrize("name", CLASSES)


@pytest.fixture(autouse=True)
def spelt_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolVLM's processor asks for a package that spells the number of a video's frames."""
    monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", str)


@pytest.mark.parametrize(
    ("name", "text", "whole"), [("idefics3", "llama", True), ("idefics3", "gemma3", False), ("smolvlm", "qwen2", False)]
)
@torch.inference_mode()
def test_parts_are_the_sources(build_tiny: Any, tiny_parts: Any, name: str, text: str, whole: bool) -> None:
    """Weights, the features of a tile before and after the shuffle, and the logits of text."""
    sources = tiny_parts(text, tie=text == "qwen2"), tiny_parts("siglip", whole=whole)
    out = build_tiny(*sources, architecture=name)
    model, processor = load(out), AutoProcessor.from_pretrained(out)
    assert (type(model), type(processor)) == CLASSES[name]
    tower, used = SiglipVisionModel.from_pretrained(sources[1]).eval(), model.model.vision_model.state_dict()
    weights = tower.state_dict()
    assert {key for key in weights if key not in used} == {key for key in weights if key.startswith("head.")}
    assert all(torch.equal(x, weights[key]) for key, x in used.items())
    ids = torch.randint(0, VOCAB, (2, 17), generator=torch.Generator().manual_seed(0))
    expected = AutoModelForCausalLM.from_pretrained(sources[0]).eval()(input_ids=ids).logits
    assert torch.equal(model(input_ids=ids).logits[..., :VOCAB], expected)
    pixels = torch.randn(1, 2, 3, 60, 60, generator=torch.Generator().manual_seed(0))
    features = tower(pixels[0]).last_hidden_state
    squares = features.view(2, 2, 2, 2, 2, 64).transpose(2, 3).reshape(2, 4, 256)
    found = model.get_image_features(pixels)
    # transformers 5.23 returns a list of samples.
    hidden, pooled = (
        torch.cat([part.reshape(-1, part.shape[-1]) for part in x]).reshape(2, -1, x[0].shape[-1])
        for x in (found.last_hidden_state, found.pooler_output)
    )
    torch.testing.assert_close(hidden, features, rtol=0, atol=1e-6)
    weight = model.model.connector.modality_projection.proj.weight
    torch.testing.assert_close(pooled, squares @ weight.T, rtol=0, atol=1e-5)


@by_class
def test_tokens_and_tiles(build_tiny: Any, tiny_parts: Any, name: str) -> None:
    """Each mark is one token that the model has, tiles are normalized as the tower's own images are."""
    source = tiny_parts("siglip")
    out = build_tiny(tiny_parts("llama", vocab_size=352), source, architecture=name)
    model, processor = load(out), AutoProcessor.from_pretrained(out)
    tokenizer, images = processor.tokenizer, processor.image_processor
    ids = [tokenizer(mark, add_special_tokens=False).input_ids for mark in MARKS]
    assert [len(x) for x in ids] == [1] * len(MARKS)
    assert max(tokenizer.get_vocab().values()) < model.config.text_config.vocab_size == len(model.lm_head.weight)
    assert all(tokenizer.added_tokens_decoder[x].special for (x,) in ids)
    assert (images.size.longest_edge, images.max_image_size["longest_edge"], processor.image_seq_len) == (240, 60, 4)
    tile = Image.effect_noise((60, 60), 90).convert("RGB")
    expected = AutoImageProcessor.from_pretrained(source)(images=tile, return_tensors="pt")["pixel_values"]
    images.size["longest_edge"] = 60
    found = images(images=tile, return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@by_class
def test_it_trains_here_and_goes_back(build_tiny: Any, tiny_parts: Any, tmp_path: Path, name: str) -> None:
    """Tokens are the processor's, logits and gradients transformers', the folder comes back bit for bit."""
    text = tiny_parts("qwen2", tie=True) if name == "smolvlm" else tiny_parts("llama")
    folder = build_tiny(text, tiny_parts("siglip"), architecture=name, vocab_size_padding=name == "smolvlm")
    assert_same_ids(folder, load_assets(folder), SIZES)
    turns = (Turn("user", "<image>\nWhat? <image>"), Turn("assistant", "This."))
    pictures = tuple(noise(*size) for size in SIZES[:2])
    talks = [Conversation(turns, pictures), Conversation((Turn("user", "Why?"), Turn("assistant", "So.")), ())]
    assert_logits_and_gradients(folder, talks, theirs_of, tmp_path / "m")
    assert_goes_back(folder, tmp_path / "m", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "text"),
    [("idefics3", "mistral"), ("idefics3", "gemma3"), ("smolvlm", "gemma2"), ("smolvlm", "phi3"), ("smolvlm", "qwen3")],
)
def test_check_compares_logits(build_tiny: Any, tiny_parts: Any, tmp_path: Path, name: str, text: str) -> None:
    folder = build_tiny(tiny_parts(text), tiny_parts("siglip"), architecture=name)
    flags = ["--hf-dir", str(folder), "--megatron-dir", str(tmp_path / "m"), "--workers", "1", "--verify"]
    assert import_hf.main([*flags, "--logits", str(CHINA)]) == 0


@torch.inference_mode()
def test_a_video_passes_through_smolvlm(build_tiny: Any, tiny_parts: Any) -> None:
    folder = build_tiny(vision=tiny_parts("siglip"), architecture="smolvlm")
    model, processor = load(folder), AutoProcessor.from_pretrained(folder)
    frames = np.random.default_rng(0).integers(0, 255, (3, 40, 90, 3), dtype=np.uint8)
    batch = processor(videos=[[frames]], text="<video> What is this?", return_tensors="pt")
    assert (batch["input_ids"] == model.config.image_token_id).sum() == 3 * 4
    assert batch["pixel_values"].shape[-2:] == (60, 60) and model(**batch).logits.isfinite().all()


@by_class
def test_the_seed_decides_the_connector(build_tiny: Any, tiny_parts: Any, name: str) -> None:
    tower = tiny_parts("siglip")
    first, again, other = (tensors_of(build_tiny(None, tower, seed=x, architecture=name), "") for x in (5, 5, 6))
    assert all(torch.equal(first[key], again[key]) for key in first)
    changed = {key for key in first if not torch.equal(first[key], other[key])}
    assert changed == {"model.connector.modality_projection.proj.weight"}
    assert 0.05 < first[changed.pop()].abs().max() <= 1 / 256**0.5


@by_class
def test_with_another_picture_size(build_tiny: Any, tiny_parts: Any, name: str) -> None:
    """Positions are interpolated as transformers does, and tokens follow the size."""
    folder = build_tiny(None, tiny_parts("siglip"), image_size=84, architecture=name)
    model, processor = load(folder), AutoProcessor.from_pretrained(folder)
    assert model.model.vision_model.embeddings.position_embedding.weight.shape == (36, 64)
    assert (processor.image_seq_len, processor.image_processor.max_image_size["longest_edge"]) == (9, 84)
    assert_same_ids(folder, load_assets(folder), SIZES)
    tower = SiglipVisionModel.from_pretrained(tiny_parts("siglip"))
    pixels = torch.randn(1, 1, 3, 84, 84, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = tower(pixels[0], interpolate_pos_encoding=True).last_hidden_state
        found = model.get_image_features(pixels).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


ROUNDED = next(side for side in range(2, 41, 2) if not is_plain_grid(side))
"""An even side of a grid of which transformers rounds positions."""


@by_class
@pytest.mark.parametrize(
    ("tower", "options", "message"),
    [
        ("clip", {}, r"is a SigLIP \(siglip_vision_model\), but --vision-model .* 'clip_vision_model'"),
        ("siglip", {"vision_feature_layers": (-2,)}, "reads the tower's last layer: omit"),
        ("siglip", {"expand_projector": True}, "reads the tower's last layer: omit"),
        ("siglip", {"connector": "perceiver"}, "has the connector pixel_shuffle; --connector perceiver does not fit"),
        ("siglip", {"image_size": 70}, "--connector pixel_shuffle: 25 features of an image do not form a square"),
        ("siglip", {"image_size": 14 * ROUNDED}, "make a grid of .* transformers rounds some to the positions of"),
    ],
)
def test_what_the_class_cannot_have(
    build_tiny: Any, tiny_parts: Any, name: str, tower: str, options: dict[str, Any], message: str
) -> None:
    text = tiny_parts("llama", max_position_embeddings=4096)
    with pytest.raises(ConfigError, match=message):
        build_tiny(text, tiny_parts(tower), architecture=name, **options)


def test_a_package_that_is_not_installed(build_tiny: Any, tiny_parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", None)
    with pytest.raises(ConfigError, match="--architecture smolvlm: Package `num2words` is required"):
        build_tiny(vision=tiny_parts("siglip"), architecture="smolvlm")


@by_class
def test_command_line(tiny_parts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """The command prints the numbers of tokens, the tower and the widths of the connector."""
    argv = ["--save-dir", str(tmp_path / "out"), "--text-model", str(tiny_parts("qwen2"))]
    argv += ["--vision-model", str(tiny_parts("siglip")), "--connector", "pixel_shuffle", "--architecture", name]
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert "4 tokens per tile, about 68 for an image with the largest grid" in said
    assert f"{name}_vision: 3 layers x 64, 60 px" in said and "256 -> 64" in said
