"""Families beyond the first ones: what a check of logits finds in them, what is refused, and that the page is true."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlavaForConditionalGeneration, Qwen2Config, Siglip2VisionConfig, SiglipConfig

from llava_mcore.build.sources import ModelSource
from llava_mcore.build.vision import load_vision_config
from llava_mcore.checkpoint.layout import latest_checkpoint
from llava_mcore.cli.import_hf import main
from llava_mcore.convert.compare_logits import compare_logits
from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.convert.logits_worker import LogitsLayout
from llava_mcore.errors import ConfigError, ConversionError
from llava_mcore.models.architectures.hf_config import load_hf_config, model_dims
from llava_mcore.models.language.families.registry import texts_of_any_class
from llava_mcore.models.vision.families.registry import VISION_FAMILIES, towers_of_any_class
from llava_mcore.training import model_options
from llava_mcore.training.model_options import transformer_impl
from llava_mcore.weights.layouts import Copy
from llava_mcore.weights.table import Entry
from tests.helpers.photos import CHINA
from tests.helpers.tiny_hf import make_hf_llava
from tests.parallel.training_checks import run_config
from tests.unit.convert.test_check_model import mutate

ROOT = Path(__file__).parents[3]
LAYER = "language_model.decoder.layers.1."
TOWER_LAYER = "vision_model.decoder.layers.1."


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families") / "gemma"
    make_hf_llava(folder, vision="dinov2_with_registers", text="gemma3", tie=True)
    return folder


@pytest.fixture(scope="module")
def phi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families") / "phi"
    make_hf_llava(folder, vision="internvit", text="phi3", text_overrides={"num_key_value_heads": 8})
    return folder


def exchange(entries: dict[str, Entry], one: str, two: str) -> None:
    """Let two Megatron tensors of one shape change places, in both directions."""
    entries[one], entries[two] = (replace(entries[x], hf=entries[y].hf) for x, y in ((one, two), (two, one)))


def exchange_norms(entries: dict[str, Entry]) -> None:
    exchange(
        entries,
        LAYER + "self_attention.linear_proj.post_layernorm.weight",
        LAYER + "mlp.linear_fc2.post_layernorm.weight",
    )


def exchange_scales(entries: dict[str, Entry]) -> None:
    exchange(entries, TOWER_LAYER + "self_attn_bda.scale", TOWER_LAYER + "mlp_bda.scale")


def leave_fused_rows(entries: dict[str, Entry]) -> None:
    name = LAYER + "self_attention.linear_qkv.weight"
    entries[name] = replace(entries[name], layout=Copy())


def test_logits_and_every_module_agree(gemma: Path, tmp_path: Path) -> None:
    import_hf(gemma, tmp_path / "m", tensor_parallel=2, verify=True)
    got = compare_logits(gemma, latest_checkpoint(tmp_path / "m")[0], CHINA, layout=LogitsLayout(tp=2))
    assert got.difference <= 1e-5 < got.largest
    # embedding, patches, positions, projector, final norm; 3 layers of the tower, 4 of Gemma 3
    assert (got.num_modules, got.not_compared) == (6 + 3 * 9 + 4 * 14, ())


@pytest.mark.parametrize(
    ("family", "change", "expected"),
    [
        ("gemma", exchange_norms, "layers.1.post_attention_layernorm.weight: max abs"),
        ("gemma", exchange_scales, "vision_tower.encoder.layer.1.norm2.bias, vision_tower.encoder.layer.1.norm2.wei"),
        ("phi", leave_fused_rows, "layers.1.self_attn.qkv_proj.weight: max abs"),
    ],
)
def test_tensors_that_are_wrong_in_both_directions_are_named(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    change: Any,
    expected: str,
) -> None:
    hf = request.getfixturevalue(family)
    mutate(monkeypatch, change)
    import_hf(hf, tmp_path / "m", verify=True)  # hashes agree: both directions are wrong in the same way
    with pytest.raises(ConversionError, match=f"first difference: .*{re.escape(expected)}"):
        compare_logits(hf, latest_checkpoint(tmp_path / "m")[0], CHINA, layout=LogitsLayout())


def test_an_export_generates_what_the_source_does(gemma: Path, tmp_path: Path) -> None:
    import_hf(gemma, tmp_path / "m", tensor_parallel=2)
    export_hf(tmp_path / "m", tmp_path / "out", max_shard_size="100KB")
    made = []
    for folder in (gemma, tmp_path / "out"):
        model, info = LlavaForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        ids = torch.tensor([[model.config.image_token_id] * model.config.image_seq_length + [7, 8, 9, 10]])
        pixels = torch.randn(1, 3, 56, 56, generator=torch.Generator().manual_seed(0))
        made.append(model.generate(input_ids=ids, pixel_values=pixels, max_new_tokens=12, do_sample=False))
    assert torch.equal(made[0], made[1]) and made[0].shape[1] > 20


LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("family", "part", "values", "message"),
    [
        ("gemma", "text_config", {"use_bidirectional_attention": True}, "only causal decoders are supported"),
        (
            "gemma",
            "text_config",
            {"model_type": "gemma3"},
            "whole vision-language model; its text model is gemma3_text",
        ),
        ("gemma", "text_config", {"attention_bias": True}, "text_config.attention_bias = true"),
        ("gemma", "vision_config", {"drop_path_rate": 0.1}, "vision_config.drop_path_rate = 0.1 is not supported"),
        ("gemma", "vision_config", {"qkv_bias": False}, "vision_config.qkv_bias = False is not supported"),
        ("gemma", "vision_config", {"image_size": [56, 42]}, "only square images"),
        ("gemma", "vision_config", {"model_type": "siglip2_vision_model"}, "NaFlex"),
        ("phi", "text_config", {"resid_pdrop": 0.1}, "text_config.resid_pdrop = 0.1"),
        ("phi", "text_config", {"rope_parameters": LONG_ROPE}, "rope_type = 'longrope' is not supported"),
    ],
)
def test_what_cannot_be_computed_is_refused(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    family: str,
    part: str,
    values: dict[str, Any],
    message: str,
) -> None:
    source, hf = request.getfixturevalue(family), tmp_path / "hf"
    hf.mkdir()
    for path in source.iterdir():
        (hf / path.name).symlink_to(path)
    config = json.loads((source / "config.json").read_text())
    config[part] |= values
    (hf / "config.json").unlink()
    (hf / "config.json").write_text(json.dumps(config))
    assert main(["--hf-dir", str(hf), "--megatron-dir", str(tmp_path / "m")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_layers_of_transformer_engine_are_not_used_where_they_cannot_compute(gemma: Path, phi: Path) -> None:
    here: Any = SimpleNamespace(device=torch.device("cpu"))
    gemma_config, phi_config = load_hf_config(gemma), load_hf_config(phi)
    unsaid: dict[str, Any] = {"model.transformer_impl": None}
    assert transformer_impl(run_config(1, 1, "", "", **unsaid), here, gemma_config) == "local"
    ring = {"parallel.context_parallel_size": 2, "parallel.cp_comm_type": "p2p"}
    with pytest.raises(ConfigError, match="--cp-comm-type p2p: gemma3_text models have windows or soft caps"):
        transformer_impl(run_config(1, 1, "", "", **unsaid, **ring), here, gemma_config)
    for flags in ({"model.transformer_impl": "transformer_engine"}, unsaid | {"training.fp8": True}):
        run = run_config(1, 1, "", "", **flags)
        with pytest.raises(ConfigError, match="gemma3_text models have local layers only"):
            transformer_impl(run, here, gemma_config)
        with pytest.raises(ConfigError, match="needs GPUs"):
            transformer_impl(run, here, phi_config)


def test_kernels_need_a_compiler(phi: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(model_options, "HAVE_TE", True)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    run = run_config(1, 1, "", "", **{"model.transformer_impl": None})
    with pytest.raises(ConfigError, match="needs gcc or clang"):
        transformer_impl(run, gpu, load_hf_config(phi))
    (tmp_path / "gcc").write_text("")
    (tmp_path / "gcc").chmod(0o755)
    assert transformer_impl(run, gpu, load_hf_config(phi)) == "transformer_engine"


def test_qwen2_5_is_a_qwen2_and_windows_that_are_computed_limit_nothing(gemma: Path, tmp_path: Path) -> None:
    # The keys of Qwen2.5-7B-Instruct's config.json, with small sizes.
    qwen = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "use_sliding_window": False,
        "num_hidden_layers": 2,
    }
    config = json.loads((gemma / "config.json").read_text())
    assert model_dims(load_hf_config(gemma)).sliding_window is None
    (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": qwen}))
    read = load_hf_config(tmp_path)
    assert isinstance(read.text_config, Qwen2Config) and read.text_config.model_type in texts_of_any_class()
    assert model_dims(read).sliding_window is None


def test_a_siglip_2_of_fixed_resolution_is_a_siglip(tmp_path: Path) -> None:
    # As in google/siglip2-base-patch16-224: the vocabulary is what is new.
    SiglipConfig(text_config={"vocab_size": 256000}, vision_config={"vision_use_head": True}).save_pretrained(tmp_path)
    assert load_vision_config(ModelSource(str(tmp_path))).model_type in VISION_FAMILIES
    make_hf_llava(tmp_path / "hf", vision="siglip", vision_overrides={"vision_use_head": False})
    import_hf(tmp_path / "hf", tmp_path / "m")
    export_hf(tmp_path / "m", tmp_path / "out", verify=True)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "hf/model.safetensors").read_bytes()
    Siglip2VisionConfig().save_pretrained(tmp_path / "naflex")
    with pytest.raises(ConversionError, match="NaFlex"):
        load_vision_config(ModelSource(str(tmp_path / "naflex")))


def test_the_page_about_adding_a_family_names_what_there_is() -> None:
    page = (ROOT / "docs" / "extend" / "family.md").read_text(encoding="utf-8")
    files = set(re.findall(r"`((?:llava_mcore|tests|docs)/[\w/]+\.(?:py|md))`", page))
    assert len(files) >= 10
    assert [name for name in files if not (ROOT / name).is_file()] == []
    functions = set(re.findall(r"`(\w+)\(", page))
    source = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in files if name.endswith(".py"))
    assert [name for name in functions if f"def {name}" not in source and f"class {name}" not in source] == []
    for kind in (*texts_of_any_class(), *towers_of_any_class()):
        assert f"`{kind}`" in (ROOT / "docs" / "build.md").read_text(encoding="utf-8")
