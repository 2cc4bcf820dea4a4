"""build --connector perceiver: Idefics2 of any SigLIP and language model, images of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoProcessor, Idefics2ForConditionalGeneration, SiglipVisionModel

from llava_mcore.cli.build import main
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.data.samples import Conversation, Turn
from llava_mcore.errors import ConfigError
from tests.helpers.build_checks import assert_goes_back
from tests.helpers.build_parts import VOCAB, load, tensors_of
from tests.helpers.class_checks import assert_logits_and_gradients
from tests.helpers.tiny_idefics2 import assert_the_processors_tokens, theirs_of
from tests.helpers.videos import noise

pytest_plugins = ("tests.helpers.build_fixtures",)

PERCEIVER = {"connector": "perceiver"}
SIZES = ((131, 57), (40, 300), (60, 60), (7, 9), (500, 333), (28, 29))


@pytest.mark.parametrize(("text", "whole"), [("llama", False), ("qwen2", True), ("mistral", False), ("phi3", True)])
def test_parts_are_the_sources(build_tiny: Any, tiny_parts: Any, text: str, whole: bool) -> None:
    sources = tiny_parts(text, tie=text == "qwen2"), tiny_parts("siglip", whole=whole)
    model = load(build_tiny(*sources, **PERCEIVER))
    assert type(model) is Idefics2ForConditionalGeneration
    tower = SiglipVisionModel.from_pretrained(sources[1]).state_dict()
    used = model.model.vision_model.state_dict()
    assert {name for name in tower if name not in used} == {name for name in tower if name.startswith("head.")}
    assert all(torch.equal(x, tower[name]) for name, x in used.items())
    ids = torch.randint(0, VOCAB, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(sources[0]).eval()(input_ids=ids).logits
        assert torch.equal(model(input_ids=ids).logits[..., :VOCAB], expected)


def test_it_trains_here_and_goes_back(build_tiny: Any, tiny_parts: Any, tmp_path: Path) -> None:
    """Logits and gradients of images of several sizes are transformers', the folder comes back bit for bit."""
    folder = build_tiny(tiny_parts("qwen2", tie=True), tiny_parts("siglip"), vocab_size_padding=True, **PERCEIVER)
    assert_the_processors_tokens(folder, load_assets(folder), SIZES)
    turns = (Turn("user", "<image>\nWhat? <image>"), Turn("assistant", "This."))
    pictures = tuple(noise(*size) for size in SIZES[:2])
    talks = [Conversation(turns, pictures), Conversation((Turn("user", "Why?"), Turn("assistant", "So.")), ())]
    assert_logits_and_gradients(folder, talks, theirs_of, tmp_path / "m")
    assert_goes_back(folder, tmp_path / "m", tmp_path / "out")


def test_the_seed_decides_the_connector(build_tiny: Any, tiny_parts: Any) -> None:
    tower = tiny_parts("siglip")
    first, again, other = (tensors_of(build_tiny(None, tower, seed=x, **PERCEIVER), "") for x in (5, 5, 6))
    assert all(torch.equal(first[name], again[name]) for name in first)
    changed = {name for name in first if not torch.equal(first[name], other[name])}
    new = {name for name in first if name.startswith("model.connector.")}
    assert changed == {name for name in new if "norm" not in name}
    assert all((first[name] == 1).all() for name in new - changed)
    latents = first["model.connector.perceiver_resampler.latents"]
    assert latents.shape == (64, 64) and 0.015 < latents.std() < 0.025


def test_with_another_picture_size(build_tiny: Any, tiny_parts: Any) -> None:
    """The table of positions grows; the number of tokens does not, even where the patches outnumber positions."""
    folder = build_tiny(
        tiny_parts("llama", max_position_embeddings=80), tiny_parts("siglip"), image_size=140, **PERCEIVER
    )
    model, processor = load(folder), AutoProcessor.from_pretrained(folder)
    assert model.model.vision_model.embeddings.position_embedding.weight.shape == (100, 64)
    assert dict(processor.image_processor.size)["longest_edge"] == 140
    assert_the_processors_tokens(folder, load_assets(folder), SIZES)


@pytest.mark.parametrize(
    ("text", "tower", "options", "message"),
    [
        (
            "llama",
            "clip",
            {},
            r"is a SigLIP \(siglip_vision_model\), but --vision-model .* 'clip_vision_model'",
        ),
        ("gemma3", "siglip", {}, "--connector perceiver: text_config has no hidden_act"),
        ("llama", "siglip", {"vision_feature_layers": (-2,)}, "reads the tower's last layer: omit"),
        ("llama", "siglip", {"expand_projector": True}, "reads the tower's last layer: omit"),
        ("llama", "siglip", {"architecture": "llava"}, "--architecture llava has the connector mlp"),
    ],
)
def test_what_the_class_cannot_have(
    build_tiny: Any, tiny_parts: Any, text: str, tower: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_tiny(tiny_parts(text), tiny_parts(tower), **PERCEIVER, **options)


def test_command_line(tiny_parts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints the number of tokens, the tower and the widths of the connector."""
    argv = ["--save-dir", str(tmp_path / "out"), "--text-model", str(tiny_parts("qwen2"))]
    argv += ["--vision-model", str(tiny_parts("siglip"))]
    assert main([*argv, "--architecture", "idefics2"]) == 0
    said = capsys.readouterr().out
    assert "64 tokens per image" in said and "idefics2_vision: 3 layers x 64, 60 px" in said
    assert "64 -> 128 -> 64" in said
