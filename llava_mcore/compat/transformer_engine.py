"""Messages of tensor parallelism that travel while matrix products run, by Transformer Engine 2.20's user buffers.

A buffer holds the tokens of one forward pass, so only passes of exactly that many tokens use it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llava_mcore.compat.required import replace_name, required

_SWITCHES = (
    "ub_overlap_ag_fprop",
    "ub_overlap_rs_fprop",
    "ub_overlap_ag_dgrad",
    "ub_overlap_rs_dgrad",
    "ub_bulk_dgrad",
    "ub_bulk_wgrad",
)
"""Settings of a linear layer: which of its messages go through the buffers."""
_RING: dict[str, Any] = {
    "method": "ring_exchange",
    "is_reduce_scatter": True,
    "num_sm": 1,
    "cga_size": 1,
    "set_sm_margin": False,
    "use_ce": True,
}
"""A message is sent in parts, each as soon as a part of the product is finished."""
_BULK: dict[str, Any] = {"method": "bulk", "num_sm": 4, "cga_size": 2, "set_sm_margin": True}
"""A whole message is sent beside another product. Few multiprocessors suffice between GPUs of one node, and the product
has the others."""


def open_user_buffers(num_tokens: int, hidden_size: int, tp_size: int, dtype: torch.dtype, *, fp8: bool) -> None:
    """Allocate the buffers, which all decoder layers share; a collective call of all ranks.

    Args:
        num_tokens: of a forward pass, over all tensor-parallel ranks.
    """
    # Copy engines and peer-to-peer writes move the data. Without this, Transformer Engine would use NVLink's multicast.
    os.environ.setdefault("UB_SKIPMC", "1")
    from transformer_engine.pytorch.module import base  # on GPUs only

    if required(base, "is_ub_initialized")():  # for an earlier model of this process
        required(base, "destroy_ub")()
    modes = required(base, "UserBufferQuantizationMode")
    required(base, "initialize_ub")(
        [num_tokens, hidden_size],
        tp_size,
        quantization_modes=[modes.NONE, modes.FP8] if fp8 else [modes.NONE],
        dtype=dtype,
        ub_cfgs=_methods(tp_size),
        bootstrap_backend="gloo",
    )


def _methods(tp_size: int) -> dict[str, dict[str, Any]]:
    """Return how the messages of a layer's matrices are sent, where that is not Transformer Engine's default."""
    ring = _RING | {"num_splits": tp_size}
    methods = {name: dict(ring) for name in ("proj_fprop", "fc2_fprop")}
    gathers = {name: _BULK | {"is_reduce_scatter": False} for name in ("qkv_dgrad", "fc1_dgrad")}
    scatters = {name: _BULK | {"is_reduce_scatter": True} for name in ("qkv_wgrad", "fc1_wgrad")}
    return methods | gathers | scatters


def overlap_full_passes(decoder: nn.Module, num_tokens: int, tp_size: int) -> None:
    """Let the linear layers of a decoder use the buffers in passes of exactly `num_tokens`; in others, such as those of
    validation, messages go through NCCL.

    Each layer decides by its own input, so that a part that is recomputed does as it did before.

    Args:
        num_tokens: of a pass, over all tensor-parallel ranks.
    """
    for linear in decoder.modules():
        if _SWITCHES[0] in vars(linear):
            switches = {name: required(linear, name) for name in _SWITCHES if name in vars(linear)}
            # The second matrix of a block reads all tokens, the first one this rank's part of them.
            rows = num_tokens if required(linear, "parallel_mode") == "row" else num_tokens // tp_size
            linear.register_forward_pre_hook(partial(_choose, switches, rows))


def _choose(switches: Mapping[str, bool], rows: int, linear: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Switch a layer's messages for its next pass. `rows`: of the input of a full pass."""
    is_full = inputs[0].numel() == rows * inputs[0].shape[-1]
    for name, value in switches.items():
        replace_name(linear, name, value and is_full)
