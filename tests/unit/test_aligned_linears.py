"""The layer that pads its products is the layer that does not."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (before megatron.core)

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

from llava_mcore.compat.aligned_linears import AlignedRowParallelLinear
from llava_mcore.parallel.groups import single_process


def test_outputs_and_gradients_are_the_same() -> None:
    with single_process() as groups:
        config = TransformerConfig(num_layers=1, hidden_size=12, num_attention_heads=1, use_cpu_initialization=True)
        given = {"config": config, "init_method": torch.nn.init.normal_, "bias": True, "input_is_parallel": True}
        given |= {"skip_bias_add": False, "tp_group": groups.tensor_parallel}
        plain, aligned = (kind(70, 12, **given) for kind in (RowParallelLinear, AlignedRowParallelLinear))
        torch.nn.init.normal_(plain.bias)
        aligned.load_state_dict(plain.state_dict())
        found = [_outputs_and_gradients(layer) for layer in (plain, aligned)]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def _outputs_and_gradients(layer: RowParallelLinear) -> list[torch.Tensor]:
    x = torch.randn(5, 2, 70, generator=torch.Generator().manual_seed(1)).requires_grad_()
    out, bias = layer(x)
    assert bias is None and out.shape == (5, 2, 12)
    out.square().sum().backward()
    return [out, x.grad, layer.weight.grad, layer.bias.grad]
