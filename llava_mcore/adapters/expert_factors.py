"""LoRA on the experts of a mixture: an A and a B of each expert's own, as PEFT has it for fused tensors of experts.

PEFT (`target_parameters`) has them as A [r * E, h] and B [o, r * E], where B's columns count experts first, and wraps
the module of the experts once for each tensor. It has no DoRA and no dropout for them.

E: experts, e: those of this rank, t: tokens that came to them, r: rank, h: inputs, o: outputs of a matrix.
"""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import zlib
from collections.abc import Sequence
from functools import partial

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor, nn
from torch.nn import Parameter

from llava_mcore.adapters.linear_layers import HfLinear
from llava_mcore.adapters.targets import LoraSettings
from llava_mcore.models.language.experts import ExpertMatrices, grouped_product

_PLACE = "expert_place"
"""Mark of a parameter: this rank's place among those that divide experts, their number, and the replica's number."""


class ExpertFactors(nn.Module):
    """The matrices of one tensor of this rank's experts: `lora_A` [e, r, h], `lora_B` [e, o, r]."""

    def __init__(self, lora_A: Parameter, lora_B: Parameter) -> None:
        super().__init__()
        self.lora_A, self.lora_B = lora_A, lora_B

    @torch.no_grad()
    def to_peft(self) -> tuple[Tensor, Tensor]:
        """Return A [r * E, h] and B [o, r * E], where this rank has all experts."""
        return self.lora_A.flatten(0, 1), self.lora_B.permute(1, 2, 0).flatten(1)

    @torch.no_grad()
    def fill(self, A: Tensor, B: Tensor) -> None:
        """Take this rank's experts from PEFT's A [r * E, h] and B [o, r * E]."""
        rank, size, _ = vars(self.lora_A)[_PLACE]
        num_experts = size * len(self.lora_A)
        self.lora_A.copy_(A.unflatten(0, (num_experts, -1)).chunk(size)[rank])
        self.lora_B.copy_(B.unflatten(1, (-1, num_experts)).permute(2, 0, 1).chunk(size)[rank])


def new_expert_factors(module: ExpertMatrices, plan: LoraSettings, member: HfLinear, seed: int) -> ExpertFactors:
    """Return the factors of a tensor of experts as PEFT initializes them: B is zero, so that nothing changes yet.

    They do not depend on the layout: every rank draws A of all experts and keeps its own.
    """
    weight, ep, lora_rank = module.weight, module.groups.ep, plan.lora_ranks[member.name]
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {plan.name} {member.part} {member.key}".encode()))
    bound = member.inputs**-0.5  # kaiming_uniform_(a=sqrt(5)), as torch.nn.Linear's
    full = torch.empty(member.experts, lora_rank, member.inputs).uniform_(-bound, bound, generator=generator)
    device = torch.device("cpu") if weight.is_meta else weight.device
    A = Parameter(full.chunk(ep.size())[ep.rank()].to(device, weight.dtype, copy=True))
    B = Parameter(torch.zeros(len(A), member.outputs, lora_rank, dtype=weight.dtype, device=device))
    for parameter in (A, B):
        # Marks as those of the experts themselves: over which ranks gradients are added up, and who counts them.
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        marks = vars(parameter)
        marks |= {name: vars(weight)[name] for name in ("allreduce", "of_experts")}
        marks[_PLACE] = (ep.rank(), ep.size(), module.groups.expt_dp.rank())
    factors = ExpertFactors(A, B)
    factors.requires_grad_(plan.is_trained)
    return factors


def add_to_output(module: ExpertMatrices, adapters: Sequence[tuple[ExpertFactors, float]]) -> None:
    """Let adapters, each with its scaling, add to what the matrices return."""

    def hook(_module: nn.Module, inputs: tuple[Tensor, Tensor], output: Tensor) -> Tensor:
        x, ends = inputs
        product = partial(grouped_product, ends=ends)
        for factors, scaling in adapters:
            output = output + product(product(x, factors.lora_A), factors.lora_B) * scaling
        return output

    module.register_forward_hook(hook)


def sharded_factor(key: str, parameter: Tensor) -> ShardedTensor | None:
    """Return a factor of experts as ranks divide it; None: it is none."""
    if _PLACE not in vars(parameter):
        return None
    rank, size, replica = vars(parameter)[_PLACE]
    return ShardedTensor.from_rank_offsets(key, parameter, (0, rank, size), replica_id=(0, 0, replica))
