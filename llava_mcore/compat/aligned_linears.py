"""The linear layers of an MLP whose inner width is not a multiple of what GPUs read at once.

Between them rows are wider, filled up with zeros, which every activation function here keeps: neither the products nor
the activation function are slower than those of a multiple. The parameters keep their size.

megatron-core (0.19.2) multiplies in `_forward_impl`; everything else, such as the sum over ranks, stays as it is.
Import `llava_mcore.parallel` first, as for megatron.core itself.

s: tokens, b: samples, h: hidden size, f: a rank's part of the inner width, p: f and the zeros.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from llava_mcore.compat.required import required

required(ColumnParallelLinear, "_forward_impl")
required(RowParallelLinear, "_forward_impl")
ALIGNED = 8
"""Numbers of 16 bits in the 16 bytes to which cuBLAS wants rows aligned (cuBLAS manual, "Tensor Core Usage")."""
_PADDED_TO = 64


class AlignedColumnParallelLinear(ColumnParallelLinear):
    """The first layer: its outputs are p wide; of a gated MLP the gate and the other half, each."""

    pads_outputs = True
    """False: f wide, as adapters of this layer and the next need them."""

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, **given: Any) -> Tensor:
        """Return x W' + bias [s, b, p or 2 p] (called by megatron-core)."""
        if given["sequence_parallel"]:
            raise ValueError("towers are not sequence-parallel, and only they have layers of this class")
        if given["allreduce_dgrad"]:
            input = copy_to_tensor_model_parallel_region(input, group=given["tp_group"])
        if not self.pads_outputs:
            return F.linear(input, weight, bias)
        halves = 2 if self.config.gated_linear_unit else 1
        rows = weight.unflatten(0, (halves, -1))
        missing = -rows.shape[1] % _PADDED_TO
        padded = F.pad(rows, (0, 0, 0, missing)).flatten(0, 1)
        return F.linear(input, padded, None if bias is None else F.pad(bias.view(halves, -1), (0, missing)).flatten())


class AlignedRowParallelLinear(RowParallelLinear):
    """The second layer: its inputs are p wide, or f, which it pads itself."""

    def _forward_impl(self, input: Tensor, weight: Tensor, **_: Any) -> Tensor:
        """Return x W' [s, b, h] (called by megatron-core, without a bias)."""
        missing = -weight.shape[1] % _PADDED_TO
        if input.shape[-1] == weight.shape[1]:
            input = F.pad(input, (0, missing))
        return F.linear(input, F.pad(weight, (0, missing)))
