"""MLPs whose layers pad their products are those whose layers do not."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (before megatron.core)

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from llava_mcore.compat.aligned_linears import ALIGNED, AlignedColumnParallelLinear, AlignedRowParallelLinear
from llava_mcore.mapping.fused_norms import FUSED_NORMS
from llava_mcore.models.vision.layers.te_layers import te_layer_spec
from llava_mcore.parallel.groups import single_process
from tests.helpers.world import run_world

HIDDEN, INNER = 12, 140
KINDS = ((ColumnParallelLinear, RowParallelLinear), (AlignedColumnParallelLinear, AlignedRowParallelLinear))


@pytest.mark.parametrize("gated", [False, True])
def test_outputs_and_gradients_are_the_same(gated: bool) -> None:
    with single_process() as groups:
        compare(groups.tensor_parallel, 1, gated)


def test_ranks_that_divide_the_layers() -> None:
    run_world(2, "tests.unit.test_aligned_linears:compare_both")


@pytest.mark.parametrize("width", [140, 144])
def test_the_mlp_has_a_norm_before_it(width: int) -> None:
    """Transformer Engine's first layer has it inside, the aligned one has not."""
    config = TransformerConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, ffn_hidden_size=width)
    layer = te_layer_spec(config).submodules
    is_aligned = width % ALIGNED != 0
    assert (layer.pre_mlp_layernorm is TENorm) == is_aligned
    assert layer.sharded_state_dict_keys_map == (FUSED_NORMS if is_aligned else {})


def compare_both() -> None:
    """Run on every rank of a world of two."""
    from tests.parallel.checks import join

    groups = join(2, 1)
    for gated in (False, True):
        compare(groups.tensor_parallel, 2, gated)


def compare(group: Any, tp: int, gated: bool) -> None:
    """Compare the plain layers with those that pad: wider rows between them, or not."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        gated_linear_unit=gated,
        tensor_model_parallel_size=tp,
        use_cpu_initialization=True,
    )
    given = {"config": config, "init_method": nn.init.normal_, "bias": True, "skip_bias_add": False, "tp_group": group}
    found = []
    for into, out_of in KINDS:
        torch.manual_seed(0)
        first = into(HIDDEN, INNER * (1 + gated), gather_output=False, **given)
        second = out_of(INNER, HIDDEN, input_is_parallel=True, **given)
        for bias in (first.bias, second.bias):
            nn.init.normal_(bias)
        found.append(partial(outputs_and_gradients, first, second, gated))
    plain, aligned = (run() for run in found)
    assert aligned[0].shape[-1] == (1 + gated) * 64 * -(-INNER // tp // 64)
    same(aligned[1:], plain[1:])
    found[1].args[0].pads_outputs = False
    same(found[1](), plain)


def outputs_and_gradients(first: nn.Module, second: nn.Module, gated: bool) -> list[torch.Tensor]:
    x = torch.randn(5, 2, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
    inner, _ = first(x)
    out, bias = second(_activated(inner, gated))
    assert bias is None and out.shape == x.shape
    parameters = [*first.parameters(), *second.parameters()]
    return [inner, out, *torch.autograd.grad(out.square().sum(), [x, *parameters])]


def _activated(inner: torch.Tensor, gated: bool) -> torch.Tensor:
    if not gated:
        return F.gelu(inner)
    gate, up = inner.chunk(2, dim=-1)
    return F.silu(gate) * up


def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> None:
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * other.abs().max().item())
