"""Building Qwen2-Audio from Whisper's encoder and a language model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoProcessor,
    Qwen2AudioForConditionalGeneration,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from llava_mcore.cli.build import main as build
from llava_mcore.cli.check import main as check
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.data.encode.encode import tokenize
from llava_mcore.data.samples import Audio, Conversation, Turn
from tests.helpers.build_parts import save_text
from tests.helpers.tiny_audio import RATE, encoded, wave
from tests.helpers.tiny_hf import randomise

QUESTION = "What is said?"


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Whisper, as the hub has it: with a decoder and the head that shares its embedding."""
    folder = tmp_path_factory.mktemp("whisper")
    config = WhisperConfig(
        d_model=32,
        encoder_layers=3,
        encoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_layers=1,
        decoder_attention_heads=4,
        decoder_ffn_dim=32,
        num_mel_bins=16,
        vocab_size=70,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model = WhisperForConditionalGeneration(config)
    randomise(model, seed=5)
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text(tmp_path_factory.mktemp("text"), "llama", tie=True)


@pytest.fixture(scope="module")
def built(whisper: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "hf"
    flags = ["--text-model", str(text), "--audio-model", str(whisper), "--save-dir", str(folder)]
    assert build([*flags, "--vocab-size-padding"]) == 0
    return folder


def test_every_weight_is_that_of_its_source(built: Path, whisper: Path, text: Path) -> None:
    files = load_file(built / "model.safetensors")
    encoder = {
        name.removeprefix("model.encoder."): x
        for name, x in load_file(whisper / "model.safetensors").items()
        if name.startswith("model.encoder.")
    }
    assert {name.removeprefix("audio_tower.") for name in files if name.startswith("audio_tower.")} == encoder.keys()
    assert all(torch.equal(files[f"audio_tower.{name}"], x) for name, x in encoder.items())
    decoder = AutoModelForCausalLM.from_pretrained(text).model.state_dict()
    for name, x in decoder.items():
        assert torch.equal(files[f"language_model.model.{name}"][: len(x)], x), name
    # A tied output layer becomes a copy.
    embedding = files["language_model.model.embed_tokens.weight"]
    assert torch.equal(files["language_model.lm_head.weight"], embedding) and len(embedding) % 128 == 0
    config = json.loads((built / "config.json").read_text())
    assert not config["text_config"]["tie_word_embeddings"] and config["audio_config"]["encoder_layers"] == 3


def test_transformers_opens_it_and_training_reads_the_same(built: Path) -> None:
    """Typed content, through the preamble of the text model's own template."""
    processor = AutoProcessor.from_pretrained(built)
    model = Qwen2AudioForConditionalGeneration.from_pretrained(built)
    messages = [
        {"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": QUESTION}]},
        {"role": "assistant", "content": [{"type": "text", "text": "no."}]},
    ]
    said = processor.apply_chat_template(messages)
    assert said.count("<|audio_bos|><|AUDIO|><|audio_eos|>\n") == 1
    inputs = processor(text=said, audio=[wave(1.0)], sampling_rate=RATE, return_tensors="pt")
    assert torch.isfinite(model(**inputs).logits).all()
    assets = load_assets(built)
    turns = (Turn("user", f"<audio>\n{QUESTION}"), Turn("assistant", "no."))
    found = tokenize(Conversation(turns, (), audios=(Audio(encoded(1.0)),)), assets, "k")
    assert found.input_ids.tolist() == inputs["input_ids"][0].tolist()
    for name in ("plain", "vicuna"):
        assert load_assets(built, chat_template=name).chat.media_ids == {"<audio>": assets.plan.audio_token_id}


def test_it_is_imported_and_computes_the_same(built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "clip.flac").write_bytes(encoded(2.0, kind="FLAC"))
    import_hf(built, tmp_path / "m", tensor_parallel=2, verify=True)
    flags = ["--hf-dir", str(built), "--megatron-dir", str(tmp_path / "m"), "--tp", "2"]
    assert check([*flags, "--logits", str(tmp_path / "clip.flac")]) == 0
    assert "max abs difference" in capsys.readouterr().out


def test_an_encoder_alone_is_enough(built: Path, whisper: Path, text: Path, tmp_path: Path) -> None:
    """A folder without the decoder's tensors; half of the encoder is not enough."""
    alone = tmp_path / "encoder"
    alone.mkdir()
    for name in ("config.json", "preprocessor_config.json"):
        (alone / name).write_bytes((whisper / name).read_bytes())
    tensors = {k: x for k, x in load_file(whisper / "model.safetensors").items() if k.startswith("model.encoder.")}
    save_file(tensors, alone / "model.safetensors", metadata={"format": "pt"})
    flags = ["--text-model", str(text), "--audio-model", str(alone), "--vocab-size-padding"]
    assert build([*flags, "--save-dir", str(tmp_path / "hf")]) == 0
    here, there = load_file(tmp_path / "hf" / "model.safetensors"), load_file(built / "model.safetensors")
    assert here.keys() == there.keys() and all(torch.equal(here[k], there[k]) for k in here)
    del tensors["model.encoder.layers.1.fc1.weight"]
    save_file(tensors, alone / "model.safetensors", metadata={"format": "pt"})
    assert build([*flags, "--save-dir", str(tmp_path / "none")]) == 2
    assert not (tmp_path / "none").exists()


REFUSED: dict[str, tuple[list[str], Any, str]] = {
    "flags for images": (
        ["--image-size", "56", "--connector", "mlp"],
        None,
        "which has no images: omit --connector, --image-size",
    ),
    "not Whisper": ([], lambda c: c.update(model_type="wav2vec2"), "model_type is 'wav2vec2'; the supported audio"),
    "dropout": ([], lambda c: c.update(dropout=0.1), "audio_config.dropout = 0.1 is not supported"),
    "other mel bins": ([], lambda c: c.update(num_mel_bins=80), "feature_size = 16, not 80"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what: str, whisper: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be built is one message, and nothing is written."""
    flags, change, expected = REFUSED[what]
    folder = tmp_path / "whisper"
    folder.mkdir()
    for path in whisper.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    if change is not None:
        values = json.loads((folder / "config.json").read_text())
        change(values)
        (folder / "config.json").write_text(json.dumps(values))
    given = ["--text-model", str(text), "--audio-model", str(folder), "--save-dir", str(tmp_path / "hf"), *flags]
    assert build(given) == 2
    assert re.search(expected, capsys.readouterr().err) and not (tmp_path / "hf").exists()
