"""Which files of a Hugging Face folder are its weights, and what an export carries beside them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlavaNextForConditionalGeneration

from llava_mcore.build.language import load_language_config
from llava_mcore.build.sources import ModelSource
from llava_mcore.convert.companions import model_companions, text_companions, update_config
from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.errors import ConversionError
from llava_mcore.files.hf_files import INDEX, SINGLE, copy_files
from llava_mcore.files.hf_folder import HfFolder
from llava_mcore.models.whole_folder import open_whole_folder
from tests.helpers.tiny_hf import make_hf_llava

X, Y = {"x": torch.zeros(2)}, {"x": torch.ones(2)}
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write(folder: Path, files: dict[str, dict[str, torch.Tensor]], index: dict[str, str] | None = None) -> Path:
    for name, tensors in files.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if index is not None:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def test_the_single_file_is_read_beside_a_stale_index_and_old_shards(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = HfFolder.open(write(tmp_path, {SINGLE: Y, B: X}, {"x": A}))
    assert folder.get("x").tolist() == [1, 1]
    folder.warn_of_ignored()
    assert f"not from {B}, {INDEX}" in caplog.text
    (tmp_path / INDEX).write_text("{damaged")
    with pytest.raises(ConversionError, match="not an index of weight files"):  # transformers does not look at it
        HfFolder.open(tmp_path)


def test_the_index_decides_among_shards(tmp_path: Path) -> None:
    folder = HfFolder.open(write(tmp_path, {A: X, "model-00001-of-00001.safetensors": Y}, {"x": A}))
    assert folder.get("x").tolist() == [0, 0]


def test_config_json_may_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"transformers_weights": "other.safetensors"}))
    assert HfFolder.open(write(tmp_path, {SINGLE: X, "other.safetensors": Y})).get("x").tolist() == [1, 1]
    (tmp_path / "config.json").write_text(json.dumps({"transformers_weights": "../other.safetensors"}))
    with pytest.raises(ConversionError, match="expected a safetensors file in the folder"):
        HfFolder.open(tmp_path)


@pytest.mark.parametrize(
    ("files", "index", "message"),
    [
        ({SINGLE: X, A: Y}, {"x": A}, "two copies of the weights: model.safetensors, which transformers reads"),
        ({A: X, B: X | {"y": torch.ones(1)}}, {"x": A, "y": B}, f"x: in {A} and in {B}"),
        ({A: X}, {"x": A, "y": B}, f"{B}"),
        ({A: X}, None, f"{A} without an index of its files: rename it to model.safetensors"),
        ({"model.fp16.safetensors": X}, None, "model.fp16.safetensors without an index"),
        ({}, None, "no weights that can be read; expected model.safetensors or"),
    ],
)
def test_what_is_ambiguous_or_missing_is_refused(
    tmp_path: Path, files: dict[str, dict[str, torch.Tensor]], index: dict[str, str] | None, message: str
) -> None:
    with pytest.raises(ConversionError) as error:
        HfFolder.open(write(tmp_path, files, index))
    assert message in str(error.value)


def test_an_adapter_beside_whole_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/base"}))
    write(tmp_path, {SINGLE: X})
    for read in (HfFolder.open, lambda folder: load_language_config(ModelSource(str(folder)))):
        with pytest.raises(ConversionError, match=r"also a PEFT adapter .*would load some/base with the adapter"):
            read(tmp_path)


def test_companions_have_no_adapter_and_replace_nothing(tmp_path: Path) -> None:
    source, tokenizer, target = (tmp_path / name for name in ("source", "tokenizer", "target"))
    for folder in (source, tokenizer, target):
        folder.mkdir()
    for name in ("config.json", "tokenizer.json", "adapter_config.json", "adapter_model.safetensors", "tensors.json"):
        (source / name).write_text("{}")
        (tokenizer / name).write_text('{"from": "tokenizer"}')
    (tokenizer / "tokenizer_config.json").write_text("{}")
    assert set(text_companions(tokenizer)) == {"tokenizer.json", "tokenizer_config.json"}
    files = model_companions(source, tokenizer)
    assert {name: path.parent.name for name, path in files.items()} == {
        "config.json": "source",
        "tokenizer.json": "tokenizer",
        "tokenizer_config.json": "tokenizer",
    }
    (target / "config.json").write_text("{}")
    with pytest.raises(ConversionError, match="written before"):
        copy_files(files, target)


def test_every_dtype_of_every_section_is_that_of_the_weights(tmp_path: Path) -> None:
    text = {"torch_dtype": "float16", "nested": {"dtype": None}}
    config = {"dtype": "float32", "torch_dtype": "bfloat16", "text_config": text, "vision_config": {"size": 1}}
    quantized = {"quantization_config": {"dtype": "int8"}, "transformers_weights": "x.safetensors"}
    (tmp_path / "config.json").write_text(json.dumps(config | quantized))
    update_config(tmp_path, "bfloat16")
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "text_config": {"torch_dtype": "bfloat16", "nested": {"dtype": "bfloat16"}},
        "vision_config": {"size": 1},
        "quantization_config": {"dtype": "int8"},
    }


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A class of which transformers 5 does not read the key in text_config."""
    folder = tmp_path_factory.mktemp("folders") / "hf"
    make_hf_llava(folder, architecture="llava_next", tie=True)
    return folder


def change(source: Path, target: Path, config: Callable[[dict[str, object]], None], head_only: bool) -> Path:
    shutil.copytree(source, target)
    values = json.loads((target / "config.json").read_text())
    config(values)
    (target / "config.json").write_text(json.dumps(values))
    if head_only:
        weights = load_file(target / SINGLE)
        weights["language_model.lm_head.weight"] = weights.pop("language_model.model.embed_tokens.weight")
        save_file(weights, target / SINGLE, metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("kind", ["in text_config only", "head only"])
def test_either_name_of_a_tied_matrix(tmp_path: Path, tied: Path, kind: str) -> None:
    head_only = kind == "head only"

    def only_below(config: dict[str, object]) -> None:
        if not head_only:
            del config["tie_word_embeddings"]

    hf = change(tied, tmp_path / "hf", only_below, head_only)
    open_whole_folder(hf)
    import_hf(hf, tmp_path / "m", verify=True)
    export_hf(tmp_path / "m", tmp_path / "out")
    assert load_file(hf / SINGLE).keys() == load_file(tmp_path / "out" / SINGLE).keys()
    ids = torch.arange(5, 15)[None]
    expected, after = (LlavaNextForConditionalGeneration.from_pretrained(x) for x in (tied, tmp_path / "out"))
    with torch.no_grad():
        assert torch.equal(expected(input_ids=ids).logits, after(input_ids=ids).logits)
    if not head_only:
        with pytest.raises(ConversionError, match=r"lm_head.weight is missing"):
            open_whole_folder(hf, with_our_config=False)


def test_weights_that_do_not_fill_the_model_are_refused(tmp_path: Path, tied: Path) -> None:
    """transformers would answer with random numbers in their place."""
    lacks = change(tied, tmp_path / "lacks", lambda c: None, head_only=False)
    name = "language_model.model.layers.1.mlp.down_proj.weight"
    save_file({k: x for k, x in load_file(lacks / SINGLE).items() if k != name}, lacks / SINGLE, {"format": "pt"})
    with pytest.raises(ConversionError, match=r"layers.1.mlp.down_proj.weight is missing"):
        open_whole_folder(lacks)

    def wider(config: dict[str, object]) -> None:
        text = config["text_config"]
        assert isinstance(text, dict)
        text["intermediate_size"] = 136

    other = change(tied, tmp_path / "other", wider, head_only=False)
    with pytest.raises(ConversionError, match=r"up_proj.weight is \(128, 64\), but config.json gives \(136, 64\)"):
        open_whole_folder(other)
