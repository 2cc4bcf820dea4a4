"""`build --tiny`: a folder of every class, which the other commands take."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoProcessor

from llava_mcore.build.tiny.classes import _WRITERS
from llava_mcore.cli.build import main
from llava_mcore.config.rules.trainer_list import MODEL_CLASSES
from llava_mcore.convert.check import check_checkpoint, check_folder
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.data.encode.encode import tokenize
from llava_mcore.data.samples import Conversation, Turn
from llava_mcore.models.architectures.hf_config import load_hf_config

TURNS = (
    Turn("system", "Be short.", trained=False),
    Turn("user", "What is 漢字?"),
    Turn("assistant", "A word."),
)


def test_every_class_has_a_tiny_folder() -> None:
    assert _WRITERS.keys() == MODEL_CLASSES.keys()


@pytest.mark.parametrize("name", MODEL_CLASSES)
def test_a_tiny_folder_converts_and_reads_conversations(name: str, tmp_path: Path) -> None:
    """Its template marks answers and nothing else, and its checkpoint holds its weights at tp 2."""
    assert main(["--tiny", name, "--save-dir", str(tmp_path / "tiny")]) == 0
    assert load_hf_config(tmp_path / "tiny").model_type == name
    check_folder(tmp_path / "tiny", tp=2, pp=1 if name == "mllama" else 2)  # which has one stage
    assets = load_assets(tmp_path / "tiny")
    tokens = tokenize(Conversation(TURNS, ()), assets, "key")
    trained = assets.tokenizer.decode(tokens.input_ids[tokens.trained].tolist())
    assert trained.strip() == "A word.</s>"
    text = assets.tokenizer.decode(tokens.input_ids.tolist())
    assert "Be short." in text and "USER: What is 漢字? ASSISTANT:" in text
    if name != "smolvlm":  # its processor needs num2words
        assert AutoProcessor.from_pretrained(tmp_path / "tiny").chat_template
    import_hf(tmp_path / "tiny", tmp_path / "megatron", tensor_parallel=2)
    check_checkpoint(tmp_path / "tiny", tmp_path / "megatron", tp=2)


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    for folder, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert main(["--tiny", "llava", "--save-dir", str(tmp_path / folder), "--seed", seed]) == 0
    a, b, c = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in "abc")
    assert a == b != c


def test_flags_that_do_not_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--save-dir", str(tmp_path / "out")]
    assert main(["--tiny", "llava", "--image-size", "28", "--vocab-size-padding", *out]) == 2
    assert "--tiny has parts of its own: omit --vocab-size-padding, --image-size" in capsys.readouterr().err
    assert main(out) == 2
    assert "give --text-model, the language model; --tiny CLASS" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").touch()
    assert main(["--tiny", "llava", *out]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
