"""A model's adapters as parameters: new ones, where they are in the model, and how checkpoints hold them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from torch import Tensor, nn
from torch.nn import Parameter

from llava_mcore.adapters.linear_layers import HfLinear
from llava_mcore.adapters.lora import Division, Factors
from llava_mcore.adapters.targets import LoraSettings

CHILD = "adapters"
"""Name of a part's adapters beside its own modules: language_model.adapters.NAME.layers.0.self_attn.q_proj.lora_A."""


class Adapters(nn.Module):
    """The adapters of one part of the model, by name, each a tree of Hugging Face's module names."""

    def add(self, adapter: str, key: str, factors: Factors) -> None:
        """Put the factors of one layer at ADAPTER.KEY."""
        module: nn.Module = self
        *path, last = [adapter, *key.split(".")]
        for name in path:
            if name not in dict(module.named_children()):
                module.add_module(name, nn.Module())
            module = module.get_submodule(name)
        module.add_module(last, factors)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return every factor as it is divided (called by megatron-core)."""
        state = {}
        for name, parameter in self.named_parameters():
            key, marks = prefix + name, vars(parameter)
            if marks["tensor_model_parallel"]:
                state[key] = make_tp_sharded_tensor_for_checkpoint(parameter, key, marks["partition_dim"])
            else:
                state[key] = make_sharded_tensor_for_checkpoint(parameter, key)
        return state


def is_adapter(parameter: str) -> bool:
    """Return whether a parameter, by its name in the model, belongs to an adapter."""
    return parameter.split(".")[1:2] == [CHILD]


def part_adapters(part: nn.Module) -> Adapters:
    """Return the adapters of a part of the model; a container for them is added if it has none."""
    children = dict(part.named_children())
    if CHILD not in children:
        part.add_module(CHILD, Adapters())
    adapters = part.get_submodule(CHILD)
    assert isinstance(adapters, Adapters)
    return adapters


def new_factors(
    weight: Tensor,
    plan: LoraSettings,
    linear: HfLinear,
    rows: Sequence[int],
    division: Division,
    *,
    seed: int,
    magnitudes: Sequence[Tensor],
) -> Factors:
    """Return the factors of one Hugging Face layer as PEFT initializes them: B is zero, so that nothing changes yet.

    They do not depend on the layout: every rank draws all of A and keeps its part.

    Args:
        weight: of the whole layer on this rank, [o, h], from which device and dtype are taken.
        linear: the Hugging Face layer. Columns of A for padded inputs are zero.
        rows: of the Hugging Face layer's blocks.
        seed: of the run; every layer draws other numbers.
        magnitudes: norms of the rows of these blocks for DoRA; empty without it.
    """
    # All of A is drawn, so that the numbers do not depend on the layout; a rank keeps its columns.
    num_local = weight.shape[1]
    num_inputs = num_local * division.tp_size if division.is_row_parallel else num_local
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {plan.name} {linear.part} {linear.key}".encode()))
    A_shape, B_shape = plan.factor_shapes(linear)
    bound = linear.inputs**-0.5  # kaiming_uniform_(a=sqrt(5)), as torch.nn.Linear's
    full = torch.empty(A_shape).uniform_(-bound, bound, generator=generator)
    full = F.pad(full, (0, num_inputs - linear.inputs))
    if division.is_row_parallel:
        full = full[:, division.tp_rank * num_local :][:, :num_local]
    # B is zero. On the meta device there is no norm to start from.
    device = torch.device("cpu") if weight.is_meta else weight.device
    A = Parameter(full.to(device, weight.dtype))
    B = [Parameter(torch.zeros(num_rows, B_shape[1], dtype=weight.dtype, device=device)) for num_rows in rows]
    lengths = [Parameter(torch.zeros_like(x, device=device) if x.is_meta else x.to(weight.dtype)) for x in magnitudes]
    # Marks for gradients and checkpoints: which dim the ranks divide.
    outputs = None if division.is_row_parallel else 0
    _mark(A, 1 if division.is_row_parallel else None, division)
    for parameter in (*B, *lengths):
        _mark(parameter, outputs, division)
    return Factors(A, B, lengths)


def _mark(parameter: Parameter, dim: int | None, division: Division) -> None:
    """Mark the dim along which ranks divide a parameter; None: each has all of it.

    With sequence parallelism, a rank's gradient of the latter comes from its own tokens only, and must be summed. This
    mark is how megatron-core's gradient finalization finds it; without it every rank would train a copy of its own.
    """
    dim = None if division.own_tokens else dim
    set_tensor_model_parallel_attributes(parameter, dim is not None, -1 if dim is None else dim, 1)
    vars(parameter)["sequence_parallel"] = division.sequence_parallel and dim is None
