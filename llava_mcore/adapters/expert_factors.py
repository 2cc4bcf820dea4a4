"""LoRA on the experts of a mixture: an A and a B of each expert's own, as PEFT has it for fused tensors of experts.

PEFT (`target_parameters`) has them as A [r * E, h] and B [o, r * E], where B's columns count experts first, and wraps
the module of the experts once for each tensor. It has no DoRA and no dropout for them.

Where ranks divide each expert's outputs (expert tensor parallelism), they divide B's rows in the same way, and A's
columns where they divide its inputs. Each has all of the other factor, and the sum of its gradients.

E: experts, e: those of this rank, t: tokens that came to them, r: rank, h: inputs, o: outputs of a matrix.
"""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import zlib
from collections.abc import Sequence
from functools import partial

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, set_tensor_model_parallel_attributes
from torch import Tensor, nn
from torch.nn import Parameter

from llava_mcore.adapters.linear_layers import HfLinear
from llava_mcore.adapters.targets import LoraSettings
from llava_mcore.models.language.expert_parts import ExpertPart
from llava_mcore.models.language.experts import ExpertMatrices
from llava_mcore.models.language.grouped_products import grouped_product

_PART = "expert_part"
"""Mark of a parameter: this rank's part of the factors of all experts."""


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
        of_A, of_B = _part(self.lora_A), _part(self.lora_B)
        num_experts = of_A.ep_size * len(self.lora_A)
        self.lora_A.copy_(of_A.cut(A.unflatten(0, (num_experts, -1))))
        self.lora_B.copy_(of_B.cut(B.unflatten(1, (-1, num_experts)).permute(2, 0, 1)))


def new_expert_factors(module: ExpertMatrices, plan: LoraSettings, member: HfLinear, seed: int) -> ExpertFactors:
    """Return the factors of a tensor of experts as PEFT initializes them: B is zero, so that nothing changes yet.

    They do not depend on the layout: every rank draws A of all experts and keeps its own.
    """
    weight, (shape_of_A, _) = module.weight, plan.factor_shapes(member)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {plan.name} {member.part} {member.key}".encode()))
    bound = member.inputs**-0.5  # kaiming_uniform_(a=sqrt(5)), as torch.nn.Linear's
    full = torch.empty(shape_of_A).uniform_(-bound, bound, generator=generator).unflatten(0, (member.experts, -1))
    # Ranks divide B's rows, or A's columns, as they divide the matrices.
    divides_outputs = module.split_dim == 1
    of_A = ExpertPart.of(module.groups, None if divides_outputs else 2)
    of_B = ExpertPart.of(module.groups, 1 if divides_outputs else None, module.num_blocks)
    device = torch.device("cpu") if weight.is_meta else weight.device
    A = Parameter(of_A.cut(full).to(device, weight.dtype, copy=True))
    rows = member.outputs // (of_B.num_parts if divides_outputs else 1)
    B = Parameter(torch.zeros(len(A), rows, A.shape[1], dtype=weight.dtype, device=device))
    for parameter, part in ((A, of_A), (B, of_B)):
        # Marks as those of the experts themselves: over which ranks gradients are added up, and who counts them.
        is_divided = part.split_dim is not None or part.num_parts == 1
        set_tensor_model_parallel_attributes(parameter, is_parallel=is_divided, dim=part.split_dim or 0, stride=1)
        marks = vars(parameter)
        marks |= {name: vars(weight)[name] for name in ("allreduce", "of_experts")}
        marks[_PART] = part
    factors = ExpertFactors(A, B)
    factors.requires_grad_(plan.is_trained)
    return factors


def add_to_output(module: ExpertMatrices, adapters: Sequence[tuple[ExpertFactors, float]]) -> None:
    """Let adapters, each with its scaling, add to what the matrices return."""

    def hook(_module: nn.Module, inputs: tuple[Tensor, Tensor], output: Tensor) -> Tensor:
        x, ends = inputs
        product = partial(grouped_product, ends=ends)
        for factors, scaling in adapters:
            A, B = shared(factors.lora_A), shared(factors.lora_B)
            output = output + product(product(x, A), B) * scaling
        return output

    def shared(factor: Parameter) -> Tensor:
        """Return a factor; of one that several ranks have, the gradients are added up, as each has a part of them."""
        part, group = _part(factor), module.groups.expt_tp
        if part.split_dim is not None or part.num_parts == 1:
            return factor
        copied: Tensor = copy_to_tensor_model_parallel_region(factor, group)
        return copied

    module.register_forward_hook(hook)
    module.is_adapted = True


def sharded_factor(key: str, parameter: Tensor) -> ShardedTensor | ShardedTensorFactory | None:
    """Return a factor of experts as ranks divide it; None: it is none."""
    return _part(parameter).sharded(key, parameter) if _PART in vars(parameter) else None


def _part(parameter: Tensor) -> ExpertPart:
    part = vars(parameter)[_PART]
    assert isinstance(part, ExpertPart)
    return part
