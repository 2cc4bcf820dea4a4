"""Which attention FlashAttention 4 computes, and what it is given: a module in its place computes by torch."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import os
import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from llava_mcore.compat import flash_attention_4
from llava_mcore.models.attention.flash import FlashAttention, decoder_uses_flash_attention, describe_flash_attention
from llava_mcore.models.language import block
from llava_mcore.models.language.shape import DecoderShape, Rope
from llava_mcore.models.vision import encoder_layers
from llava_mcore.models.vision.attention import ManyShortAttention, tower_attention
from llava_mcore.models.vision.patches import PatchShape, layer_spec
from llava_mcore.weights.names import LayerNames

HEADS, SIZE, PADDED = 2, 72, 96


def attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None, causal: bool = False) -> Tensor:
    """Return attention [s, n, d] to keys and values [s, g, d]."""
    parts = (x.transpose(0, 1) for x in (query, key, value))
    return F.scaled_dot_product_attention(*parts, is_causal=causal, scale=scale, enable_gqa=True).transpose(0, 1)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Put a module in the package's place. Return the head sizes that it is given."""
    sizes: list[int] = []

    def packed(query: Tensor, key: Tensor, value: Tensor, *, cu_seqlens_q: Tensor, **options: Any) -> Any:
        sizes.append(query.shape[-1])
        limits = [(a, b) for a, b in pairwise(cu_seqlens_q.tolist()) if a < b]
        given = {"scale": options["softmax_scale"], "causal": options["causal"]}
        parts = [attention(*(x[a:b] for x in (query, key, value)), **given) for a, b in limits]
        return torch.cat(parts), None

    module = ModuleType("flash_attn.cute")
    vars(module).update(flash_attn_varlen_func=packed)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    return sizes


def tower_config(size: int = SIZE, **options: Any) -> TransformerConfig:
    """Return the configuration of a tower with Transformer Engine's layers."""
    given = {
        "num_layers": 1,
        "hidden_size": HEADS * size,
        "num_attention_heads": HEADS,
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "attention_dropout": 0.0,
        "attention_backend": AttnBackend.auto,
    }
    config = TransformerConfig(**given | options)
    config.transformer_impl = "transformer_engine"
    return config


def test_heads_are_padded(flash: list[int]) -> None:
    """Results are those of the heads alone, whether they come with padding or without."""
    layer = FlashAttention(tower_config())
    parts = [torch.randn(9, HEADS, SIZE) for _ in range(3)]
    bounds = torch.tensor([0, 4, 9, 9], dtype=torch.int32)
    params = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=5, max_seqlen_kv=5)
    expected = torch.cat([attention(*(x[a:b] for x in parts)) for a, b in ((0, 4), (4, 9))]).flatten(1)
    for given in (parts, [F.pad(x, (0, PADDED - SIZE)) for x in parts]):
        query, key, value = given
        torch.testing.assert_close(layer(query, key, value, packed_seq_params=params), expected)
    assert flash == [PADDED] * 2


@pytest.mark.parametrize(
    ("options", "whole", "in_windows"),
    [
        ({}, FlashAttention, ManyShortAttention),
        ({"size": 80}, FlashAttention, ManyShortAttention),
        ({"size": 64}, None, ManyShortAttention),
        ({"size": 128}, None, ManyShortAttention),
        ({"attention_backend": AttnBackend.flash}, FlashAttention, ManyShortAttention),
        ({"attention_backend": AttnBackend.fused}, None, ManyShortAttention),
        ({"attention_dropout": 0.1}, None, None),
        ({"params_dtype": torch.float32, "bf16": False}, None, None),
    ],
)
def test_which_layers(
    options: dict[str, Any], whole: type | None, in_windows: type | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those whose heads cuDNN would pad more, unless it is asked for; those with windows in any case."""
    monkeypatch.setattr(flash_attention_4, "supports", lambda size: size <= flash_attention_4.LARGEST_HEAD)
    config = tower_config(**options)
    for sees_windows, expected in ((False, whole), (True, in_windows)):
        found = tower_attention(config, sees_windows=sees_windows)
        assert (None if found is None else type(found)) == expected


def test_causal_heads(flash: list[int]) -> None:
    """Packed as in a decoder, and without packing, where a sample is a sequence."""
    config = tower_config(32, num_query_groups=1)
    layer = FlashAttention(config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self")
    query, key, value = torch.randn(3, 4, HEADS, 32), *(torch.randn(3, 4, 1, 32) for _ in range(2))
    each = [attention(*(x[:, i] for x in (query, key, value)), causal=True).flatten(1) for i in range(4)]
    torch.testing.assert_close(layer(query, key, value, None), torch.stack(each, dim=1))
    packed = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
    bounds = torch.arange(0, 13, 3, dtype=torch.int32)
    params = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=3, max_seqlen_kv=3)
    torch.testing.assert_close(layer(*packed, None, packed_seq_params=params), torch.cat(each))
    assert flash == [32] * 2
    with pytest.raises(ValueError, match="no explicit mask"):
        layer(query, key, value, torch.ones(4, 1, 3, 3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"size": 64}, True),
        ({"attention_backend": AttnBackend.flash}, True),
        ({"attention_backend": AttnBackend.fused}, False),
        ({"size": 80}, False),
        ({"size": 160}, False),
        ({"window_size": (128, 0)}, False),
        ({"context_parallel_size": 2}, False),
        ({"softmax_type": "learnable"}, False),
        ({"attention_dropout": 0.1}, False),
        ({"params_dtype": torch.float32, "bf16": False}, False),
    ],
)
def test_which_decoders(options: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have Transformer Engine's attention."""
    monkeypatch.setattr(flash_attention_4, "supports", lambda size: size <= flash_attention_4.LARGEST_HEAD)
    monkeypatch.setattr(block, "get_gpt_layer_with_transformer_engine_spec", lambda **_: get_gpt_layer_local_spec())
    monkeypatch.setattr(block, "_block", lambda spec, *_, **__: spec)
    config = tower_config(**{"size": 128} | options)
    assert decoder_uses_flash_attention(config) == expected
    shape = DecoderShape(Rope(torch.ones(1), 1.0))
    found: Any = block.block_spec(config, shape, None)
    assert (found.submodules.self_attention.submodules.core_attention is FlashAttention) == expected


def test_what_the_log_says() -> None:
    """Nothing without the package."""
    flash = FlashAttention(tower_config())
    assert describe_flash_attention({"decoder": torch.nn.Linear(1, 1), "tower": None}) == ""
    assert (
        describe_flash_attention({"decoder": flash, "tower": None}) == ", attention of the decoder by FlashAttention 4"
    )
    both = describe_flash_attention({"decoder": torch.nn.Sequential(flash), "tower": flash})
    assert both == ", attention of the decoder and the tower by FlashAttention 4"


def test_not_without_the_package_and_a_gpu() -> None:
    """Here there is neither."""
    assert tower_attention(tower_config(), sees_windows=False) is None
    assert not decoder_uses_flash_attention(tower_config(128))


def test_a_broken_package_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A run says why, and continues without it."""
    monkeypatch.setattr(flash_attention_4, "distribution", lambda name: None)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    flash_attention_4.is_usable.cache_clear()
    try:
        assert not flash_attention_4.is_usable()
    finally:
        flash_attention_4.is_usable.cache_clear()
    assert "flash-attn-4 is installed and cannot be imported" in caplog.text


@pytest.mark.parametrize(("size", "kept"), [(72, True), (80, True), (96, False), (128, False)])
def test_engine_does_not_choose_it_where_gradients_would_be_wrong(
    size: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformer Engine does not pad heads."""
    name = "NVTE_FLASH_ATTN_V4"
    monkeypatch.setenv(name, "1")
    flash_attention_4.keep_from_engine(size)
    assert (os.environ[name] == "0") == kept


@pytest.mark.parametrize(("backend", "kept"), [(AttnBackend.flash, False), (AttnBackend.fused, True)])
def test_a_decoder_may_use_it_where_the_engine_has_no_such_heads(
    backend: AttnBackend, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tower that pads its heads itself does not keep --flash-attn from the decoder, whose heads may fit."""
    name = "NVTE_FLASH_ATTN_V4"
    monkeypatch.setenv(name, "1")
    monkeypatch.setattr(flash_attention_4, "supports", lambda size: True)
    monkeypatch.setattr(encoder_layers, "_te_layer_spec", get_vit_layer_with_local_spec)
    shape = PatchShape(12, 4, False, None, LayerNames("", (), "", "", (), ""))
    layer_spec(tower_config(attention_backend=backend), shape)
    assert (os.environ[name] == "0") == kept
