"""megatron-core's parallel linear layers without biases, as attention uses them for its projections."""

from __future__ import annotations

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig


def column_linear(config: TransformerConfig, inputs: int, outputs: int) -> ColumnParallelLinear:
    """Return a layer of which each tensor-parallel rank computes a part of the outputs."""
    return ColumnParallelLinear(
        inputs, outputs, config=config, init_method=config.init_method, bias=False, gather_output=False
    )


def row_linear(config: TransformerConfig, inputs: int, outputs: int) -> RowParallelLinear:
    """Return a layer that reads such parts, and whose output is the sum over ranks."""
    return RowParallelLinear(
        inputs,
        outputs,
        config=config,
        init_method=config.output_layer_init_method,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=True,
    )
