"""A row-parallel linear layer whose matrix products have rows of a size that tensor cores read at full speed.

megatron-core (0.19.2) multiplies in `_forward_impl`; everything else, such as the sum over ranks, stays as it is.
Import `llava_mcore.parallel` first, as for megatron.core itself.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import RowParallelLinear
from torch import Tensor

from llava_mcore.compat.required import required

required(RowParallelLinear, "_forward_impl")
ALIGNED = 8
"""Numbers of 16 bits in the 16 bytes to which cuBLAS wants rows aligned (cuBLAS manual, "Tensor Core Usage")."""
_PADDED_TO = 64


class AlignedRowParallelLinear(RowParallelLinear):
    """Pads x [s, b, i] and W [o, i] with zeros for the product, so that the parameter keeps its size.

    The copies take a few percent of the time of a product whose rows are not aligned.
    """

    def _forward_impl(self, input: Tensor, weight: Tensor, **_: Any) -> Tensor:
        """Return x W' [s, b, o] (called by megatron-core, without a bias)."""
        padding = (0, -input.shape[-1] % _PADDED_TO)
        return F.linear(F.pad(input, padding), F.pad(weight, padding))
