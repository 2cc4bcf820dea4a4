"""What Muon updates in each kind of model, and the matrices in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llava_mcore.files.hf_folder import HfFolder
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.model_table import detect_names, mapping_table
from llava_mcore.weights.matrices import is_matrix, matrices_in
from llava_mcore.weights.table import Entry
from tests.helpers.tiny_audio import make_hf_audio
from tests.helpers.tiny_classes import make_hf_internvl
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.tiny_idefics2 import make_hf_idefics2
from tests.helpers.tiny_qwen import make_hf_qwen

MODELS: dict[str, Callable[[Path], Any]] = {
    "llava, files with fused matrices": lambda folder: make_hf_llava(folder, text="phi3", vision="dinov2"),
    "internvl": lambda folder: make_hf_internvl(folder),
    "idefics2": lambda folder: make_hf_idefics2(folder),
    "qwen2_audio": lambda folder: make_hf_audio(folder),
    "qwen2_5_vl": lambda folder: make_hf_qwen(folder, "qwen2_5_vl"),
    "qwen3_5_moe": lambda folder: make_hf_qwen(folder, "qwen3_5_moe"),
}
LEFT_TO_ADAMW = (
    "A_log",
    "class_token",
    "conv1.weight",
    "conv1d.weight",
    "conv2.weight",
    "gate_weight",
    "latents",
    "output_layer.weight",
    "position_embeddings.weight",
    "registers",
    "router.weight",
    "word_embeddings.weight",
)
"""Ends of names of tables, convolutions, routers and the like, with more than one dimension."""


def shape_of(entry: Entry, folder: HfFolder) -> tuple[int, ...]:
    meta = {name: torch.empty(folder.tensors[name].shape, device="meta") for name in entry.hf_names}
    return tuple(entry.to_megatron(meta).shape)


@pytest.mark.parametrize("name", MODELS)
def test_each_parameter_has_its_optimizer(name: str, tmp_path: Path) -> None:
    """Linear layers are taken apart into matrices and put together again, bit for bit; the rest is known by name."""
    MODELS[name](tmp_path)
    folder, hf = HfFolder.open(tmp_path), load_hf_config(tmp_path)
    names = detect_names(hf, folder.tensors, source=name)
    table = mapping_table(hf, names, hf_tensors=folder.tensors, padded_vocab_size=hf.text_config.vocab_size)
    counts: dict[str, int] = {}
    for entry in table.entries.values():
        shape = shape_of(entry, folder)
        if not is_matrix(entry):
            is_small = len(shape) < 2 or math.prod(shape) == max(shape)
            assert is_small or entry.megatron.endswith(LEFT_TO_ADAMW), entry.megatron
            continue
        module = entry.megatron.split(".")[-2]
        tensor = entry.to_megatron({x: torch.randn(folder.tensors[x].shape) for x in entry.hf_names})
        layout = matrices_in(entry)
        parts = layout.to_hf(tensor)
        assert torch.equal(layout.to_megatron(*parts), tensor), entry.megatron
        assert {x.ndim for x in parts} == {3 if entry.shard.experts else 2}, entry.megatron
        counts[f"experts.{module}" if entry.shard.experts else module] = len(parts)
        if module == "linear_qkv":
            assert len(parts) in (3, 4), "queries, perhaps their gate, keys and values"
            assert len({x.shape for x in parts[-2:]}) == 1
    assert counts["linear_qkv"] >= 3 and counts["linear_proj"] == 1
    if name == "qwen3_5_moe":
        assert counts["linear_qkv"] == 4 or counts["in_proj"] == 6
        assert (counts["in_proj"], counts["experts.linear_fc1"], counts["experts.linear_fc2"]) == (6, 2, 1)


def test_rows_of_queries_are_not_those_of_their_gates() -> None:
    """In files the two alternate, head by head."""
    from llava_mcore.weights.layouts import FuseGatedQKV
    from llava_mcore.weights.table import COLUMN

    heads, groups, size, columns = 4, 2, 3, 5
    both, key, value = (torch.randn(n * size, columns) for n in (2 * heads, groups, groups))
    layout = FuseGatedQKV(heads, groups)
    entry = Entry("language_model.decoder.layers.0.self_attention.linear_qkv.weight", ("q", "k", "v"), COLUMN, layout)
    query, gate, *rest = matrices_in(entry).to_hf(layout.to_megatron(both, key, value))
    by_head = both.unflatten(0, (heads, 2, size))
    assert torch.equal(query, by_head[:, 0].flatten(0, 1)) and torch.equal(gate, by_head[:, 1].flatten(0, 1))
    assert torch.equal(rest[0], key) and torch.equal(rest[1], value)
