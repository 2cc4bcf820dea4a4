"""build --expand-layers: more decoder layers that compute nothing at first, in an ordinary folder of the class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from llava_mcore.build.expand import Expansion, chosen_layers, expand_folder, new_config
from llava_mcore.cli import build as build_command
from llava_mcore.config.sections.model import ModelConfig
from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.errors import ConfigError, ConversionError
from llava_mcore.files.hf_folder import HfFolder
from llava_mcore.models.architectures.expanded import EXPANDED
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.trainable import trained_parameters
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.tiny_qwen import make_hf_qwen

IDS = torch.randint(5, 300, (2, 17), generator=torch.Generator().manual_seed(0))


def quiet(line: str) -> None:
    """Take a line of progress."""


def load(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()


def text_of(folder: Path) -> dict[str, Any]:
    """The language model's settings as they are in the file."""
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values["text_config"]


FAMILIES: dict[str, Any] = {
    "llama": lambda folder: make_hf_llava(folder, text="llama"),
    "gemma3": lambda folder: make_hf_llava(folder, text="gemma3"),  # kinds of layers, and norms after both parts
    "qwen3_moe": lambda folder: make_hf_llava(folder, text="qwen3_moe"),  # the second layer has a plain MLP
    "qwen3_5": lambda folder: make_hf_qwen(folder, name="qwen3_5"),  # delta nets in three of four layers
    "qwen3_vl": lambda folder: make_hf_qwen(folder, name="qwen3_vl"),  # features are added to the first layers
}


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_first_logits_are_the_models_own(family: str, tmp_path: Path) -> None:
    """Two copies, after layers of different kinds; a folder that Megatron takes and gives back."""
    FAMILIES[family](tmp_path / "hf")
    expand_folder(tmp_path / "hf", tmp_path / "more", "2,3", quiet)
    before, after = load(tmp_path / "hf"), load(tmp_path / "more")
    text = after.config.text_config
    assert text.num_hidden_layers == before.config.text_config.num_hidden_layers + 2
    expected, logits = before(input_ids=IDS).logits, after(input_ids=IDS).logits
    assert torch.equal(logits, expected)
    assert load_hf_config(tmp_path / "more").to_dict()[EXPANDED] == [3, 5]
    # Copies of what reads the hidden states, zeros in what adds to them.
    new, old = HfFolder.open(tmp_path / "more"), HfFolder.open(tmp_path / "hf")
    copied = [name for name in new.tensors if ".layers.3." in name and "language_model" in name]
    zeros = {name for name in copied if not new.get(name).any() and name.endswith("_proj.weight")}
    assert {name.rpartition(".layers.3.")[2] for name in zeros if "experts" not in name} <= {
        "self_attn.o_proj.weight",
        "linear_attn.out_proj.weight",
        "mlp.down_proj.weight",
    }
    assert len(zeros) >= 2
    for name in set(copied) - zeros:
        assert torch.equal(new.get(name), old.get(name.replace(".layers.3.", ".layers.2."))), name
    import_hf(tmp_path / "more", tmp_path / "m", verify=True)
    export_hf(tmp_path / "m", tmp_path / "exported", verify=True)
    assert text_of(tmp_path / "exported") == text_of(tmp_path / "more")
    assert torch.equal(load(tmp_path / "exported")(input_ids=IDS).logits, expected)


@torch.inference_mode()
def test_expanded_again(tmp_path: Path) -> None:
    """The numbers of the layers that were inserted first move with them."""
    make_hf_llava(tmp_path / "hf", text="qwen3_moe")
    before = load(tmp_path / "hf")
    expand_folder(tmp_path / "hf", tmp_path / "one", "1", quiet)
    expand_folder(tmp_path / "one", tmp_path / "two", "every:2", quiet)
    config = load_hf_config(tmp_path / "two")
    assert config.to_dict()[EXPANDED] == [2, 3, 5]
    assert config.text_config.mlp_only_layers == [1, 2, 3]
    assert torch.equal(load(tmp_path / "two")(input_ids=IDS).logits, before(input_ids=IDS).logits)


def test_rules_that_count_layers_become_lists(tmp_path: Path) -> None:
    make_hf_llava(tmp_path / "hf", text="qwen3_moe")
    hf = load_hf_config(tmp_path / "hf")
    hf.text_config.decoder_sparse_step = 2  # experts in layers 1 and 3, of which the second has a plain MLP
    values = new_config({"text_config": {"decoder_sparse_step": 2}}, hf, Expansion.after([0], 4))
    assert values["text_config"]["mlp_only_layers"] == [0, 1, 2, 3]
    assert values["text_config"]["decoder_sparse_step"] == 1


def test_only_inserted_layers_are_trained(tmp_path: Path) -> None:
    make_hf_llava(tmp_path / "hf")
    expand_folder(tmp_path / "hf", tmp_path / "more", "every:4", quiet)
    hf = load_hf_config(tmp_path / "more")
    trained = trained_parameters(hf, ModelConfig(train_expanded=True))
    assert {name for name, is_trained in trained.items() if is_trained} == {
        name for name in trained if name.startswith("language_model.decoder.layers.4.")
    }
    also = ModelConfig(train_expanded=True, unfreeze=("vision_projection.*",))
    more = {name for name, is_trained in trained_parameters(hf, also).items() if is_trained and not trained[name]}
    assert more == {name for name in trained if name.startswith("vision_projection.")}
    with pytest.raises(ConfigError, match=f"--train-expanded: config.json has no {EXPANDED}"):
        trained_parameters(load_hf_config(tmp_path / "hf"), ModelConfig(train_expanded=True))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4", "has the layers 0 to 3"),
        ("1,1", "each once"),
        ("every:5", "name some of them"),
        ("every:0", "expected numbers of layers"),
        ("2;3", "expected numbers of layers"),
        ("0,3", "after the layers 0 to 1, which therefore keep their numbers: choose from 1 to 3"),
    ],
)
def test_what_is_no_choice_of_layers(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        chosen_layers(text, 4, 1, Path("model"))


def test_the_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_hf_llava(tmp_path / "hf")
    model, out = ["--model", str(tmp_path / "hf")], ["--save-dir", str(tmp_path / "more")]
    assert build_command.main([*model, *out]) == 2
    assert "--model and --expand-layers belong together" in capsys.readouterr().err
    assert build_command.main([*model, *out, "--expand-layers", "1", "--dtype", "float16"]) == 2
    assert "--model has all parts already: omit --dtype" in capsys.readouterr().err
    assert build_command.main([*model, *out, "--expand-layers", "every:2"]) == 0
    assert "decoder layers: 4 -> 6, new: 2, 5" in capsys.readouterr().out
    assert build_command.main([*model, *out, "--expand-layers", "every:2"]) == 2
    with pytest.raises(ConversionError):
        expand_folder(tmp_path / "hf" / "nothing", tmp_path / "x", "1", quiet)
