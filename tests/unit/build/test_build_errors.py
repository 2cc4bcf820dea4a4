"""What build_llava_jp refuses: one message, and nothing half-written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, LlavaForConditionalGeneration, SiglipImageProcessor

from llava_mcore.build.sources import find_source
from llava_mcore.errors import ConfigError, ConversionError
from tests.helpers.build_parts import save_image_processor, save_text, save_vision

pytest_plugins = ("tests.helpers.build_fixtures",)


def _edit(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def _remove(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names] and None


def _drop_head(folder: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder).model.save_pretrained(folder)


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def _break_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content.nothing() }}")


TEXT_FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (_remove("config.json"), "configuration cannot be read"),
    "another family": (
        lambda f: _edit(f, model_type="gpt2"),
        "'gpt2'; supported language models: gemma2, gemma3_text, llama",
    ),
    "quantized": (lambda f: _edit(f, quantization_config={"quant_method": "gptq", "bits": 4}), "quantized"),
    "no weights": (_remove("model.safetensors"), "language model cannot be read"),
    "damaged weights": (_truncate, "language model cannot be read"),
    "no lm_head": (_drop_head, "lacks weights(.|\n)*lm_head.weight"),
    "more layers than weights": (lambda f: _edit(f, num_hidden_layers=3), "lacks weights(.|\n)*layers.2"),
    "another width": (lambda f: _edit(f, intermediate_size=96), "language model cannot be read"),
    "no tokenizer": (_remove("tokenizer.json", "tokenizer_config.json"), "has no tokenizer(.|\n)*--tokenizer"),
    "broken template": (_break_template, "cannot render(.|\n)*--chat-template"),
}


@pytest.mark.parametrize("fault", TEXT_FAULTS)
def test_text_model_that_cannot_be_used(build_tiny: Any, tmp_path: Path, fault: str) -> None:
    damage, message = TEXT_FAULTS[fault]
    source = save_text(tmp_path / "text")
    damage(source)
    with pytest.raises(ConversionError, match=message):
        build_tiny(source)
    assert [p.name for p in tmp_path.iterdir()] == ["text"]  # nothing half-written is left


VISION_FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no image processor": (
        _remove("preprocessor_config.json"),
        "image processor cannot be read(.|\n)*--image-processor",
    ),
    "images of another size": (lambda f: save_image_processor(f, "clip", 28), r"\(3, 28, 28\).*\(3, 56, 56\)"),
    "another family": (lambda f: _edit(f, model_type="vit"), "'vit'; supported vision models: clip, siglip"),
    "more layers than weights": (lambda f: _edit(f, num_hidden_layers=4), "lacks weights(.|\n)*layers.3"),
}


@pytest.mark.parametrize("fault", VISION_FAULTS)
def test_vision_model_that_cannot_be_used(build_tiny: Any, tmp_path: Path, fault: str) -> None:
    damage, message = VISION_FAULTS[fault]
    source = save_vision(tmp_path / "vision", "clip")
    damage(source)
    with pytest.raises(ConversionError, match=message):
        build_tiny(vision=source)


OPTION_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no such folder": ({"text": Path("/no/such/folder")}, "--text-model /no/such/folder: no such folder"),
    "a file": ({"vision": Path(__file__)}, "--vision-model .*: is a file"),
    "no such GGUF": ({"gguf_file": "x.gguf"}, "--gguf-file x.gguf: .* has no such file"),
    "no such layer": ({"vision_feature_layers": (-5,)}, "--vision-feature-layer -5: .* 0 .* to 3, or -4 to -1"),
    "expanded twice": (
        {"vision_feature_layers": (-1, -2), "expand_projector": True},
        "--expand-projector adds a second",
    ),
    "nothing halfway": (
        {"vision_feature_layers": (1,), "expand_projector": True},
        "no layer is halfway",
    ),
    "a connector that no class has": (
        {"connector": "q_former"},
        "--connector q_former: unknown; choose one of mlp, pixel_shuffle",
    ),
    "a tower that the class does not read": (
        {"connector": "pixel_shuffle"},
        "--connector pixel_shuffle builds InternVLForConditionalGeneration, whose tower is internvl_vision in "
        "transformers; --vision-model .* is 'clip_vision_model'",
    ),
    "no whole patches": ({"image_size": 60}, r"--image-size 60: .* patches of 14 px; the nearest are 56 and 70"),
    "no image": ({"image_size": -14}, "--image-size -14: .* the smallest is 14"),
    "too large": (
        {"image_size": 14_000},
        r"--image-size 14000: .* take 1,000,001 tokens, .* 512 positions .* take a smaller size",
    ),
    "two connectors": (
        {"architecture": "llava_next", "connector": "pixel_shuffle"},
        "--architecture llava_next has the connector mlp; --connector pixel_shuffle does not fit it",
    ),
    "no such class": ({"architecture": "qwen2_vl"}, "--architecture qwen2_vl: .* llava_onevision, internvl"),
    "no template file": ({"chat_template": Path("/no/file")}, "--chat-template /no/file: cannot be read"),
    "shard size": ({"max_shard_size": "5 apples"}, "--max-shard-size 5 apples"),
}


@pytest.mark.parametrize("fault", OPTION_FAULTS)
def test_options_that_cannot_work(build_tiny: Any, fault: str) -> None:
    options, message = OPTION_FAULTS[fault]
    with pytest.raises(ConfigError, match=message):
        build_tiny(**options)


SHUFFLE_FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a grid of 5": (
        {"image_size": 70},
        {},
        "--connector pixel_shuffle: 25 features of an image do not form a square",
    ),
    "the class token": ({}, {"vision_feature_select_strategy": "full"}, "'full' leaves the class token among"),
    "two layers": ({}, {"expand_projector": True}, r"vision_feature_layer = \[-1, -3\]: InternVL reads one layer"),
    "a last norm": ({"use_mean_pooling": False}, {}, "use_mean_pooling = False adds a norm"),
}


@pytest.mark.parametrize("fault", SHUFFLE_FAULTS)
def test_what_the_shuffle_cannot_read_needs_no_weights(build_tiny: Any, tmp_path: Path, fault: str) -> None:
    tower, options, message = SHUFFLE_FAULTS[fault]
    source = save_vision(tmp_path / "vision", "internvit")
    _edit(source, **tower)
    save_image_processor(source, "clip", tower.get("image_size", 56))
    (source / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=message):
        build_tiny(vision=source, connector="pixel_shuffle", **options)


def test_a_size_that_the_image_processor_cannot_make(build_tiny: Any, tmp_path: Path) -> None:
    source = save_vision(tmp_path / "tower", "siglip")
    SiglipImageProcessor(size={"height": 60, "width": 60}, do_resize=False).save_pretrained(source)
    with pytest.raises(ConversionError, match=r"makes images of shape .*, but the tower takes \(3, 84, 84\)"):
        build_tiny(vision=source, image_size=84)


def test_siglip_has_no_class_token_to_drop(build_tiny: Any, tiny_parts: Any) -> None:
    with pytest.raises(ConfigError, match="drops the tower's first position, which is a patch"):
        build_tiny(vision=tiny_parts("siglip"), vision_feature_select_strategy="default")


def test_gguf_file_is_found(tmp_path: Path) -> None:
    find = {"flag": "--text-model", "may_be_gguf": True}
    (tmp_path / "a.gguf").touch()
    assert find_source(str(tmp_path), **find).gguf_file == "a.gguf"
    assert find_source(str(tmp_path / "a.gguf"), **find).gguf_file == "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ConfigError, match=r"choose one with --gguf-file: a.gguf, b.gguf"):
        find_source(str(tmp_path), **find)
    assert find_source(str(tmp_path), gguf_file="b.gguf", **find).gguf_file == "b.gguf"
    (tmp_path / "model.safetensors").touch()
    assert find_source(str(tmp_path), **find).gguf_file is None


def test_full_disk(build_tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one message, and no file remains."""

    def save(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LlavaForConditionalGeneration, "save_pretrained", save)
    with pytest.raises(ConversionError, match=r"cannot be written: .*No space left"):
        build_tiny()
    assert list(tmp_path.iterdir()) == []
