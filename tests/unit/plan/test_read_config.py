"""Sizes that are read without transformers, beside those of transformers and of the models that training builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import CONFIG_MAPPING, PretrainedConfig

from llava_mcore.build.tiny.classes import write_tiny
from llava_mcore.config.model_classes import MODEL_CLASSES
from llava_mcore.errors import ConfigError
from llava_mcore.models.architectures.hf_config import load_hf_config, model_dims
from llava_mcore.models.architectures.registry import ARCHITECTURES
from llava_mcore.models.model_table import detect_names, mapping_table
from llava_mcore.plan.sizes.defaults import CLASSES, PARTS, TEXTS, TOWERS
from llava_mcore.plan.sizes.read_config import read_model


def parameters(folder: Path, hf: PretrainedConfig) -> int:
    """Return the parameters that training builds, counted in the folder's files."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        names_in_file = list(file.keys())
        tensors = {x: torch.empty(file.get_slice(x).get_shape(), device="meta") for x in names_in_file}
    names = detect_names(hf, tensors, source=str(folder))
    table = mapping_table(hf, names, hf_tensors=tensors, padded_vocab_size=hf.text_config.vocab_size)
    used = {name for entry in table.entries.values() for name in entry.hf_names}  # experts of a layer may be one tensor
    return sum(tensors[name].numel() for name in used)


@pytest.mark.parametrize("kind", sorted(PARTS))
def test_sizes_of_every_class(kind: str, tmp_path: Path) -> None:
    write_tiny(kind, tmp_path / kind, 0)
    hf, model = load_hf_config(tmp_path / kind), read_model(tmp_path / kind)
    assert model.dims() == model_dims(hf)
    padding = (model.tower.padded_ffn - model.tower.ffn) * model.tower.num_layers
    matrices = (3 if model.tower.gated else 2) * model.tower.hidden + (2 if model.tower.gated else 1)
    assert model.parameters - padding * matrices == parameters(tmp_path / kind, hf)


def values_of(kind: str) -> dict[str, Any]:
    values: dict[str, Any] = CONFIG_MAPPING[kind]().to_dict()
    return values


def test_defaults_of_parts_are_transformers() -> None:
    for kind, named in {**TEXTS, **TOWERS}.items():
        values = values_of(kind)
        expected = {key: x for key, x in named.items() if x is not None}
        assert {key: values[key] for key in expected} == expected, kind


def test_defaults_of_classes_are_transformers() -> None:
    assert set(PARTS) == set(MODEL_CLASSES)
    for kind in PARTS:
        architecture = ARCHITECTURES[kind]
        hf = architecture.config_class()
        tower = getattr(hf, architecture.tower_section).model_type
        assert PARTS[kind] == (hf.text_config.model_type, tower)
        assert architecture.ties_embeddings(hf) == CLASSES.get(kind, {}).get("tie_word_embeddings", False)
        values = hf.to_dict()
        assert all(values[key] == x for key, x in CLASSES.get(kind, {}).items())


def test_bad_configs_are_refused(tmp_path: Path) -> None:
    def fails(text: str | None, match: str) -> None:
        if text is not None:
            (tmp_path / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=match):
            read_model(tmp_path)

    fails(None, r"No such file.*--hf-dir takes a folder")
    fails("{", "not valid JSON")
    fails("[]", "expected an object")
    fails('{"model_type": "bert"}', "'bert', expected one of llava")
    fails(json.dumps({"model_type": "llava", "vision_config": {"model_type": "vit"}}), "'vit', expected one of clip")
    fails(json.dumps({"model_type": "llava", "text_config": {"model_type": "gpt2"}}), "'gpt2'; a plan knows llama")
    fails(json.dumps({"model_type": "llava", "text_config": {"hidden_size": "wide"}}), "missing or strange")
