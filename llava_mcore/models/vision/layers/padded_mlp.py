"""MLPs padded with zeros to a width that GPUs multiply fast and that more ranks can divide.

The outputs for zero rows of the first matrix and its bias are zero, activation functions keep that, and zero columns of
the second matrix ignore them. Their gradients are zero too, so that they stay zero, and exports leave them out.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.mlp import MLP

_MULTIPLE = 128
"""Then each of up to eight ranks has a multiple of 16, and of 16-bit numbers cuBLAS wants 8 (its manual, "Tensor Core
Usage")."""


def padded_width(width: int) -> int:
    """Return the width in the model. It does not depend on the number of ranks, nor do checkpoints."""
    return -(-width // _MULTIPLE) * _MULTIPLE


@torch.no_grad()
def clear_padding(mlp: MLP, width: int, *, tp_rank: int) -> None:
    """Set to zero what a rank's part of a new MLP has beyond its width.

    Args:
        width: in Hugging Face's files; where it is gated, of the gate alone.
    """
    into, out_of = mlp.linear_fc1, mlp.linear_fc2
    num_columns = out_of.weight.shape[1]
    num_used = min(max(width - tp_rank * num_columns, 0), num_columns)
    for parameter in (into.weight, into.bias):
        for part in parameter.split(num_columns):  # gate and value, or all of it
            part[num_used:] = 0
    out_of.weight[:, num_used:] = 0
