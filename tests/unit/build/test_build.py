"""build_llava_jp: weights, vocabulary and ids come out exactly, whatever the parts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    CLIPVisionModel,
    GenerationConfig,
    InternVLForConditionalGeneration,
    SiglipVisionModel,
)

from llava_mcore.build.write_folder import describe_for_older
from llava_mcore.cli import import_hf
from llava_mcore.cli.build import main
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.models.vision.features import image_side
from tests.helpers.build_parts import (
    VOCAB,
    load,
    make_text_tokenizer,
    save_image_processor,
    save_text,
    save_vision,
    tensors_of,
)
from tests.helpers.class_tokens import assert_same_ids
from tests.helpers.photos import CHINA
from tests.helpers.tiny_hf import CORPUS, TEXTS, TEXTS_WITH_EXPERTS

ALL_TEXTS = {**TEXTS, **TEXTS_WITH_EXPERTS}
SCRIPT = Path(__file__).parents[3] / "scripts" / "convert" / "build_llava_jp.py"

pytest_plugins = ("tests.helpers.build_fixtures",)


# -- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ALL_TEXTS)
@torch.inference_mode()
def test_text_logits_equal_the_source_models(build_tiny: Any, tiny_parts: Any, kind: str, tie: bool) -> None:
    source_folder = tiny_parts(kind, tie=tie)
    out = build_tiny(source_folder)
    source, built = AutoModelForCausalLM.from_pretrained(source_folder).eval(), load(out)
    ids = torch.randint(0, VOCAB, (2, 17), generator=torch.Generator().manual_seed(0))
    expected, logits = source(input_ids=ids).logits, built(input_ids=ids).logits[..., :VOCAB]
    if kind == "gemma2":  # Gemma2ForCausalLM caps them; LLaVA in transformers does not, and the new folder says so
        cap = source.config.final_logit_softcapping
        logits = torch.tanh(logits / cap) * cap
        assert built.config.text_config.final_logit_softcapping is None
    assert torch.equal(logits, expected)
    assert (built.lm_head.weight is built.get_input_embeddings().weight) == tie
    assert built.config.tie_word_embeddings == built.config.text_config.tie_word_embeddings == tie
    assert bool(tensors_of(out, "lm_head")) != tie
    assert built.config.text_config.model_type == ALL_TEXTS[kind].model_type


@pytest.mark.parametrize(
    ("kind", "whole", "strategy", "tokens"),
    [
        ("clip", False, "default", 16),
        ("clip", True, "default", 16),
        ("siglip", False, "full", 16),
        ("siglip", True, "full", 16),
        ("dinov2_with_registers", False, "default", 20),
        ("internvit", False, "default", 16),
    ],
)
@torch.inference_mode()
def test_tower_and_its_tokens(
    build_tiny: Any, tiny_parts: Any, kind: str, whole: bool, strategy: str, tokens: int
) -> None:
    """The tower's tensors are kept, and config and processor agree on the number of its tokens."""
    source = tiny_parts(kind, whole=whole)
    out = build_tiny(vision=source)
    whole_class = {"clip": CLIPVisionModel, "siglip": SiglipVisionModel}
    tower = whole_class.get(kind, AutoModel).from_pretrained(source)
    model, processor = load(out), AutoProcessor.from_pretrained(out)
    expected, found = tower.state_dict(), model.model.vision_tower.state_dict()
    assert expected.keys() == found.keys() and all(torch.equal(found[k], expected[k]) for k in expected)
    assert model.config.vision_feature_select_strategy == processor.vision_feature_select_strategy == strategy
    assert model.config.vision_feature_layer == -2
    assert model.config.image_seq_length == tokens
    batch = processor(images=Image.new("RGB", (90, 70), "red"), text="USER: <image>\nWhat?", return_tensors="pt")
    assert (batch["input_ids"] == model.config.image_token_id).sum() == tokens
    states = tower(batch["pixel_values"], output_hidden_states=True).hidden_states[-2]
    expected_features = model.model.multi_modal_projector(states if kind == "siglip" else states[:, 1:])
    assert torch.equal(model.model.get_image_features(batch["pixel_values"]).pooler_output[0], expected_features[0])
    assert model(**batch).logits.isfinite().all()


@pytest.mark.parametrize(("kind", "side"), [("dinov2", 28), ("dinov2_with_registers", 84), ("internvit", 28)])
@torch.inference_mode()
def test_a_tower_with_positions_for_larger_pictures(build_tiny: Any, tmp_path: Path, kind: str, side: int) -> None:
    """As facebook/dinov2-base is on the hub: config.json says 518 px, the processor makes 224."""
    source = save_vision(tmp_path / "tower", kind)
    save_image_processor(source, kind, side)
    out = build_tiny(vision=source)
    tower, model, processor = AutoModel.from_pretrained(source), load(out), AutoProcessor.from_pretrained(out)
    assert (image_side(tower.config), image_side(model.config.vision_config)) == (56, side)
    batch = processor(images=Image.effect_noise((90, 70), 80).convert("RGB"), text="<image>", return_tensors="pt")
    assert batch["pixel_values"].shape[-2:] == (side, side)
    expected = tower(batch["pixel_values"], output_hidden_states=True).hidden_states
    found = model.model.vision_tower(batch["pixel_values"], output_hidden_states=True).hidden_states
    assert expected[0].shape[1] == (side // 14) ** 2 + (5 if "registers" in kind else 1)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert (batch["input_ids"] == model.config.image_token_id).sum() == expected[0].shape[1] - 1
    assert model(**batch).logits.isfinite().all()


def test_full_strategy_keeps_the_class_token(build_tiny: Any) -> None:
    out = build_tiny(vision_feature_select_strategy="full")
    assert load(out).config.image_seq_length == 17
    processor = AutoProcessor.from_pretrained(out)
    ids = processor(images=Image.new("RGB", (60, 60)), text="<image>")["input_ids"][0]
    assert list(ids).count(processor.image_token_id) == 17


@torch.inference_mode()
def test_expanded_projector_reads_two_layers(build_tiny: Any) -> None:
    out = build_tiny(expand_projector=True)
    model = load(out)
    assert model.config.vision_feature_layer == [-2, -3]  # of hidden states 0 to 3: number 2, and half of it
    assert model.model.multi_modal_projector.linear_1.in_features == 2 * 64
    tower, pixels = model.model.vision_tower, torch.rand(1, 3, 56, 56)
    states = tower(pixels, output_hidden_states=True).hidden_states
    both = torch.cat([states[2], states[1]], dim=-1)[:, 1:]
    assert torch.equal(
        model.model.get_image_features(pixels).pooler_output[0], model.model.multi_modal_projector(both)[0]
    )


def test_projector_depends_on_the_seed_alone(build_tiny: Any) -> None:
    first, again, other = (tensors_of(build_tiny(seed=seed), "") for seed in (5, 5, 6))
    assert all(torch.equal(first[k], again[k]) for k in first)
    changed = {k.removeprefix("model.") for k in first if not torch.equal(first[k], other[k])}
    assert changed == {f"multi_modal_projector.linear_{i}.weight" for i in (1, 2)}


@pytest.mark.parametrize(("asked", "found"), [("auto", torch.bfloat16), ("float32", torch.float32)])
def test_dtype(build_tiny: Any, tiny_parts: Any, asked: str, found: torch.dtype) -> None:
    """`auto` keeps the dtype of the language model; a named one converts every tensor."""
    text, vision = tiny_parts("qwen2", dtype=torch.bfloat16), tiny_parts("clip")
    out = build_tiny(text, vision, dtype=asked)
    assert {t.dtype for t in tensors_of(out, "").values()} == {found}
    config = json.loads((out / "config.json").read_text())
    assert {c["dtype"] for c in (config, config["text_config"], config["vision_config"])} == {str(found).split(".")[1]}
    tower = CLIPVisionModel.from_pretrained(vision).state_dict()
    saved = load(out).model.vision_tower.state_dict()
    assert all(torch.equal(saved[k], tower[k].to(found)) for k in tower)


def test_large_models_are_sharded(build_tiny: Any) -> None:
    out = build_tiny(max_shard_size="200KB")
    assert (out / "model.safetensors.index.json").is_file() and len(list(out.glob("*.safetensors"))) > 1
    assert load(out).config.model_type == "llava"


def test_files_are_for_everyone_and_name_no_machine_path(build_tiny: Any, tiny_parts: Any) -> None:
    out = build_tiny()
    assert len({p.stat().st_mode for p in out.iterdir()}) == 1
    assert not [p.name for p in out.glob("*.json*") if str(tiny_parts("llama").parent) in p.read_text()]
    assert not [p for p in out.parent.iterdir() if p.name.startswith(".")]


# -- vocabulary ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab_size", "pad", "rows"),
    [
        (350, False, 352),  # <image> and <pad> do not fit
        (351, False, 352),  # one fits
        (401, False, 401),  # both fit
        (350, True, 384),
        (384, True, 384),  # aligned already: nothing is added
        (380, True, 384),
    ],
)
def test_vocabulary_grows_only_as_needed(
    build_tiny: Any, tiny_parts: Any, vocab_size: int, pad: bool, rows: int
) -> None:
    source = tiny_parts("llama", vocab_size=vocab_size)
    out = build_tiny(source, vocab_size_padding=pad)
    original = AutoModelForCausalLM.from_pretrained(source)
    model, tokenizer = load(out), AutoTokenizer.from_pretrained(out)
    assert model.config.text_config.vocab_size == model.lm_head.out_features == rows
    assert max(tokenizer.get_vocab().values()) == 351
    for before, after in (
        (original.get_input_embeddings().weight, model.get_input_embeddings().weight),
        (original.lm_head.weight, model.lm_head.weight),
    ):
        assert after.shape[0] == rows
        assert torch.equal(after[:vocab_size], before)
        assert torch.equal(after[vocab_size:], before.mean(dim=0).expand(rows - vocab_size, -1))


@pytest.mark.parametrize(
    ("special", "pad"),
    [
        ({}, "<pad>"),
        ({"pad_token": "</s>"}, "<pad>"),
        ({"pad_token": "<unk>"}, "<unk>"),
        ({"pad_token": "<PAD>"}, "<PAD>"),
    ],
)
def test_ids_agree_and_pad_is_not_eos(build_tiny: Any, tmp_path: Path, special: dict[str, str], pad: str) -> None:
    source = save_text(tmp_path / "text", tokenizer=make_text_tokenizer(**special), eos_token_id=2)
    out = build_tiny(source)
    tokenizer, config = AutoTokenizer.from_pretrained(out), load(out).config
    generation = GenerationConfig.from_pretrained(out)
    assert tokenizer.pad_token == pad and tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.encode("<image>", add_special_tokens=False) == [config.image_token_id]
    assert config.image_token_id == config.image_token_index
    for where in (config, config.text_config, generation):
        found = (where.pad_token_id, where.eos_token_id, where.bos_token_id)
        assert found == (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id)
    text = "It is <image> seven.</s>"
    original = make_text_tokenizer(**special)
    assert original.decode(original(text).input_ids) == tokenizer.decode(tokenizer(text).input_ids) == text


def test_stop_tokens_of_the_text_model_are_kept(build_tiny: Any, tmp_path: Path) -> None:
    source = save_text(tmp_path / "text")
    # 3 is a special token of this vocabulary, 77 an ordinary one; sampling settings without do_sample are refused.
    settings = {"eos_token_id": [3, 77], "bos_token_id": 1, "temperature": 0.7}
    (source / "generation_config.json").write_text(json.dumps(settings))
    generation = GenerationConfig.from_pretrained(build_tiny(source))
    assert generation.eos_token_id == [2, 3]


def test_sentencepiece_tokenizer(build_tiny: Any, tmp_path: Path) -> None:
    """A folder that has only a SentencePiece file gets a tokenizer that gives the same ids."""
    import sentencepiece

    source = save_text(tmp_path / "text")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (source / name).unlink()
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(CORPUS * 20), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(source / "tokenizer"), vocab_size=330, model_type="bpe", byte_fallback=True,
        minloglevel=2,
    )  # fmt: skip
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    out = build_tiny(source)
    before, after = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(out)
    text = "Which digit is shown? It is 漢字."
    assert after(text).input_ids == before(text).input_ids
    assert after(text).input_ids[0] == after.bos_token_id
    assert len(after) == len(before) + 2 == 332
    rendered = after.apply_chat_template([{"role": "user", "content": "Hi."}], tokenize=False)
    assert rendered.startswith("<s>USER: Hi.")  # no template came along; this tokenizer begins its texts with BOS


# -- command line ----------------------------------------------------------------------------------------------------


def test_command_line(tiny_parts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints what it built; a second time it refuses the folder, which is not empty."""
    out = tmp_path / "deep" / "out"
    argv = ["--save-dir", str(out), "--text-model", str(tiny_parts("llama")), "--vision-model", str(tiny_parts("clip"))]
    assert main([*argv, "--vocab-size-padding", "--expand-projector", "--dtype", "float16"]) == 0
    said = capsys.readouterr().out
    assert "401 rows -> 512" in said and "multi_modal_projector" in said and "total" in said
    with safe_open(out / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert AutoImageProcessor.from_pretrained(out).crop_size["height"] == 56
    assert main(argv) == 2
    assert "exists and is not empty" in capsys.readouterr().err


def test_every_flag_is_explained(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True, check=True).stdout
    flags = [line.split(maxsplit=2) for line in shown.splitlines() if line.startswith("  --")]
    assert len(flags) == 23 and "--expand-projector" in [flag[0] for flag in flags]
    with pytest.raises(SystemExit) as stopped:
        main(["--save-dir", "x", "--text-model", "y", "--vocab-size-pad"])
    assert stopped.value.code == 2 and "--vocab-size-pad" in capsys.readouterr().err


# -- other classes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen2", "llama", "gemma3"])
def test_an_internvl_folder_of_any_language_model(
    build_tiny: Any, tiny_parts: Any, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parts exact, images as its own processor expands them, and logits of the parallel model are its own."""
    text, vision = tiny_parts(kind, tie=True), tiny_parts("internvit")
    out = build_tiny(text, vision, connector="pixel_shuffle")
    model = InternVLForConditionalGeneration.from_pretrained(out).eval()
    source = AutoModel.from_pretrained(vision).eval()
    for name, x in source.state_dict().items():
        assert torch.equal(model.model.vision_tower.state_dict()[name], x), name
    norm, config = model.model.multi_modal_projector.layer_norm, model.config
    assert norm.weight.unique().tolist() == [1.0] and norm.bias.unique().tolist() == [0.0]
    assert (config.vision_feature_layer, config.image_seq_length) == (-1, 4)
    ids = torch.randint(0, VOCAB, (2, 17), generator=torch.Generator().manual_seed(0))
    expected = AutoModelForCausalLM.from_pretrained(text).eval()(input_ids=ids).logits
    assert torch.equal(model(input_ids=ids).logits[..., :VOCAB], expected)
    own, processor = AutoImageProcessor.from_pretrained(vision), AutoProcessor.from_pretrained(out)
    assert list(processor.image_processor.image_mean) == list(own.image_mean)
    assert_same_ids(out, load_assets(out), [(56, 56), (30, 200), (100, 90)])
    flags = ["--hf-dir", str(out), "--megatron-dir", str(tmp_path / "m"), "--workers", "1", "--tp", "2"]
    assert import_hf.main([*flags, "--logits", str(CHINA)]) == 0
    assert "computes the logits of" in capsys.readouterr().out


def test_the_connector_is_a_flag(tiny_parts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = ["--text-model", str(tiny_parts("llama")), "--vision-model", str(tiny_parts("internvit"))]
    assert main([*parts, "--save-dir", str(tmp_path / "out"), "--connector", "pixel_shuffle"]) == 0
    said = capsys.readouterr().out
    assert "hidden state -1, strategy default: 4 tokens per tile" in said and "projector: 256 -> 64" in said
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "internvl"
    with pytest.raises(SystemExit):
        main([*parts, "--save-dir", str(tmp_path / "other"), "--connector", "q_former"])
    assert "invalid choice: 'q_former'" in capsys.readouterr().err


# -- programs with transformers 4 ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rope", "names"),
    [
        ({"rope_type": "default", "rope_theta": 5e5}, {"rope_theta": 5e5}),
        (
            {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0},
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        ),
        (
            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
            {"rope_theta": 1e4, "partial_rotary_factor": 0.75},
        ),
        (
            {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            },
            {
                "rope_theta": 5e5,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "rope_local_base_freq": 2e4,
            },
        ),
    ],
    ids=["default", "llama3", "partial", "per-kind"],
)
def test_rotary_settings_have_the_names_of_transformers_4_too(
    tmp_path: Path, rope: dict[str, Any], names: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"rope_parameters": rope}}))
    describe_for_older(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    assert text == {"rope_parameters": rope, **names}


def test_the_older_names_change_nothing_in_transformers_5(build_tiny: Any, tiny_parts: Any) -> None:
    out = build_tiny(tiny_parts("gemma3"))
    text = json.loads((out / "config.json").read_text())["text_config"]
    assert text["rope_local_base_freq"] == text["rope_parameters"]["sliding_attention"]["rope_theta"]
    assert load(out).config.text_config.rope_parameters == text["rope_parameters"]
