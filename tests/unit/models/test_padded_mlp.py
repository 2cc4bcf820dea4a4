"""Padded MLPs compute what those without padding do, and the padding stays zero."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (before megatron.core)

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from llava_mcore.convert.import_hf import import_hf
from llava_mcore.models.activations import quick_gelu
from llava_mcore.models.vision.encoder_layers import clear_padding, padded_width
from llava_mcore.parallel.groups import Groups, join_alone, single_process
from tests.helpers.tiny_qwen import make_hf_qwen
from tests.helpers.world import run_world
from tests.parallel.checks import join
from tests.parallel.training_checks import make_trainer, run_config

HIDDEN, WIDTH = 12, 140


def test_widths() -> None:
    """Widths grow to the next multiple of 128."""
    assert [padded_width(x) for x in (3420, 52, 4304, 5120)] == [3456, 128, 4352, 5120]


@pytest.mark.parametrize("gated", [False, True])
def test_outputs_and_zeros(gated: bool) -> None:
    """A padded MLP computes what the unpadded one does, and its padding stays zero in training."""
    with single_process() as groups:
        compare(groups, 1, gated)


def test_ranks_that_divide_the_layers() -> None:
    """The second of two ranks has 12 numbers of its own and 116 zeros."""
    run_world(2, compare_both)


def compare_both() -> None:
    """Run on every rank of a world of two."""
    groups = join(2, 1)
    for gated in (False, True):
        compare(groups, 2, gated)


def compare(groups: Groups, tp: int, gated: bool) -> None:
    """Compare with torch's operations on what is no padding; then let an optimizer train all of it."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        ffn_hidden_size=padded_width(WIDTH),
        gated_linear_unit=gated,
        activation_func=F.silu if gated else quick_gelu,
        tensor_model_parallel_size=tp,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
    )
    torch.manual_seed(0)
    submodules = get_vit_layer_with_local_spec().submodules.mlp.keywords["submodules"]
    mlp = MLP(config, submodules, tp_group=groups.tensor_parallel)
    torch.nn.init.normal_(mlp.linear_fc1.bias)
    clear_padding(mlp, WIDTH, tp_rank=groups.tp_rank)
    first = max(WIDTH - groups.tp_rank * padded_width(WIDTH) // tp, 0)
    x = torch.randn(5, 2, HIDDEN, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(mlp.parameters(), lr=0.1)
    for _ in range(3):
        for parameter in padding_of(mlp, first):
            assert not parameter.any()
        out = sum(mlp(x))
        torch.testing.assert_close(out, expected(mlp, x, first, groups), rtol=1e-5, atol=1e-5)
        optimizer.zero_grad()
        out.square().sum().backward()
        assert all(p.grad is not None for p in mlp.parameters())
        optimizer.step()


def parts(mlp: MLP) -> tuple[list[Tensor], Tensor]:
    """Return weights and biases of the first layer, each half alone, and the weight of the second."""
    into, out_of = mlp.linear_fc1, mlp.linear_fc2
    number = out_of.weight.shape[1]
    return [part for p in (into.weight, into.bias) for part in p.detach().split(number)], out_of.weight.detach()


def padding_of(mlp: MLP, first: int) -> list[Tensor]:
    halves, out_of = parts(mlp)
    return [*(x[first:] for x in halves), out_of[:, first:]]


def expected(mlp: MLP, x: Tensor, first: int, groups: Groups) -> Tensor:
    """Compute the MLP's output without padding."""
    halves, out_of = parts(mlp)
    weights, biases = (x for x in (halves[: len(halves) // 2], halves[len(halves) // 2 :]))
    inner = [F.linear(x, w[:first], b[:first]) for w, b in zip(weights, biases, strict=True)]
    inner[0] = F.silu(inner[0]) * inner[1] if len(inner) == 2 else quick_gelu(inner[0])
    found = F.linear(inner[0], out_of[:, :first])
    torch.distributed.all_reduce(found, group=groups.tensor_parallel)
    return found + mlp.linear_fc2.bias.detach()


def test_new_towers_have_zeros_there(tmp_path: Path) -> None:
    """Also with random weights, which a part has that is not loaded."""
    make_hf_qwen(tmp_path / "hf", "qwen2_5_vl")
    import_hf(tmp_path / "hf", tmp_path / "megatron")
    groups = join_alone()
    run = run_config(1, 1, str(tmp_path / "megatron"), str(tmp_path))
    tower: Any = make_trainer(groups, run).models[0].vision_model
    config = dataclasses.replace(tower.config, perform_initialization=True)
    tower = type(tower)(config, tower.shape, tower.features)  # another one, with random weights
    for layer in tower.decoder.layers:
        assert layer.mlp.linear_fc1.weight.any()
        assert not any(x.any() for x in padding_of(layer.mlp, tower.shape.ffn_size))
