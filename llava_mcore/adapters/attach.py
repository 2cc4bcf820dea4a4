"""Adapters on a model in this process: factors beside its parts, and hooks that add their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP
from torch import Tensor, nn

from llava_mcore.adapters.expert_factors import add_to_output, new_expert_factors
from llava_mcore.adapters.factors import new_factors, part_adapters
from llava_mcore.adapters.linear_layers import WEIGHT, MegatronLinear, ModelLayers
from llava_mcore.adapters.lora import Division, Factors, LinearAdapter
from llava_mcore.adapters.products import Activated, SharedMatrices
from llava_mcore.adapters.targets import LoraSettings
from llava_mcore.compat.megatron.frozen_linears import FrozenProduct, is_in_fp8
from llava_mcore.models.activations import StatelessActivation
from llava_mcore.models.language.layers import NormedRowParallelLinear
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.models.trainable import whole_name

_ATTACHED = "attached_adapters"


def attach_adapters(
    model: VisionLanguageModel,
    plans: Sequence[LoraSettings],
    layers: ModelLayers,
    *,
    tp_size: int,
    tp_rank: int,
    seed: int,
) -> None:
    """Give a stage's layers their adapters; a collective call, after the model's own weights were loaded.

    Adapters change nothing yet: they are initialized as PEFT's are. Call before the model is wrapped for data
    parallelism. In a model on the meta device, only adapters have memory.
    """
    here = linear_modules(model)
    memory, activations = SharedMatrices(), _activations(model)
    # Factors of linear layers are added to their outputs by hooks.
    for linear in layers.linears:
        chosen = [plan for plan in plans if any(member.name in plan.lora_ranks for member in linear.members)]
        if chosen and linear.name in here:
            module = here[linear.name]
            division = _division(model, module, linear, tp_size, tp_rank)
            adapters = [_new_adapter(model, module, plan, linear, division, seed, memory) for plan in chosen]
            _hook(module, adapters, activations.get(module))
    # Experts are one fused tensor, each with factors of its own.
    for tensor in layers.expert_tensors:
        (member,) = tensor.members
        chosen = [plan for plan in plans if member.name in plan.lora_ranks]
        if chosen and tensor.name in here:
            of_experts = [(new_expert_factors(here[tensor.name], plan, member, seed), plan) for plan in chosen]
            for factors, plan in of_experts:
                part_adapters(model.get_submodule(member.part)).add(plan.name, member.key, factors)
            add_to_output(here[tensor.name], [(factors, plan.scaling(member.name)) for factors, plan in of_experts])


def _activations(model: VisionLanguageModel) -> dict[nn.Module, StatelessActivation]:
    """Return the activation functions that are modules, by the layers that read their output."""
    mlps = [x for x in model.modules() if isinstance(x, MLP) and isinstance(x.activation_func, StatelessActivation)]
    return {mlp.linear_fc2: mlp.activation_func for mlp in mlps}


def linear_modules(model: VisionLanguageModel) -> dict[str, Any]:
    """Return a stage's modules that have a weight, by the names that they have in the whole model."""
    with_weight = [(name, module) for name, module in model.named_modules() if hasattr(module, "weight")]
    return {whole_name(model, name + WEIGHT).removesuffix(WEIGHT): module for name, module in with_weight}


def _matrix(module: Any) -> Tensor:
    """Return a layer's matrix, restored if it is quantized."""
    if isinstance(module, FrozenProduct):
        return module.make_matrix()
    weight: Tensor = module.weight.detach()
    return weight.dequantize() if is_in_fp8(module) else weight


def _division(model: VisionLanguageModel, module: Any, linear: MegatronLinear, tp_size: int, tp_rank: int) -> Division:
    if model.has_whole(linear.name):
        return Division(1, 0, linear.is_row_parallel, sequence_parallel=False, own_tokens=True)
    gathers = isinstance(module, ColumnParallelLinear) and module.gather_output and tp_size > 1
    return Division(tp_size, tp_rank, linear.is_row_parallel, bool(module.config.sequence_parallel), gathers)


def _new_adapter(
    model: VisionLanguageModel,
    module: Any,
    plan: LoraSettings,
    linear: MegatronLinear,
    division: Division,
    seed: int,
    memory: SharedMatrices,
) -> LinearAdapter:
    """Add one adapter's factors on a layer to the model."""
    # The layer's blocks of rows, each from one Hugging Face layer; DoRA starts from the norms of their rows.
    weight = _matrix(module)
    layout, members = linear.blocks(division.tp_size)
    norms = layout.to_hf(_row_norms(weight, division)) if plan.dora else ()
    rows = [x.shape[0] for x in layout.to_hf(torch.empty(weight.shape[0], 1, device="meta"))]
    # Factors of each adapted Hugging Face layer, registered in the part of the model that it belongs to.
    factors_by_member: dict[int, Factors] = {}
    for index, member in enumerate(linear.members):
        if member.name not in plan.lora_ranks:
            continue
        own_blocks = [i for i, owner in enumerate(members) if owner == index]
        factors_by_member[index] = factors = new_factors(
            weight,
            plan,
            member,
            [rows[i] for i in own_blocks],
            division,
            seed=seed,
            magnitudes=[norms[i] for i in own_blocks] if plan.dora else (),
        )
        factors.requires_grad_(plan.is_trained)
        part_adapters(model.get_submodule(member.part)).add(plan.name, member.key, factors)
    return LinearAdapter(plan, linear, division, factors_by_member, rows, memory)


def _row_norms(weight: Tensor, division: Division) -> Tensor:
    """Return the norms of a layer's rows, [o], fp32."""
    squares = weight.float().square().sum(1)
    if division.is_row_parallel and division.tp_size > 1:
        squares = tensor_parallel.reduce_from_tensor_model_parallel_region(squares)
    return squares.sqrt()


def adapters_of(module: nn.Module) -> Sequence[LinearAdapter]:
    """Return the adapters that change a layer's output; their parameters are elsewhere in the model."""
    adapters: Sequence[LinearAdapter] = vars(module).get(_ATTACHED, ())
    return adapters


def _hook(module: Any, adapters: Sequence[LinearAdapter], activation: StatelessActivation | None) -> None:
    """Let adapters change a layer's output, one after the other.

    Args:
        activation: recomputes the layer's input in the backward pass, from its own saved input, so that the frozen
            layer saves nothing.
    """
    # Where the input is an activation, only what it is computed from is kept for the backward pass.
    vars(module)[_ATTACHED] = tuple(adapters)
    sources: list[Tensor] = []
    if activation is not None:
        activation.register_forward_pre_hook(lambda _, inputs: sources.append(inputs[0].detach()))

    def change(x: Tensor, output: Tensor) -> Tensor:
        bias = _added_bias(module)
        activated = None if activation is None else Activated(activation.forward, sources.pop())
        for adapter in adapters:
            inputs = (x, output, bias, lambda: _matrix(module))
            output = adapter(*inputs, training=module.training, activated=activated)
        return output

    # A norm inside the layer determines where the hook goes, and what the matrix multiplies.
    if isinstance(module, NormedRowParallelLinear):
        _hook_before_norm(module, change)
        return
    fused_norm = _has_fused_norm(module)
    if fused_norm:
        module.return_layernorm_output = True  # the matrix's input is known only inside

    def hook(_module: nn.Module, inputs: tuple[Tensor, ...], result: tuple[Any, ...]) -> tuple[Any, ...]:
        if not fused_norm:
            output, bias = result
            return change(inputs[0], output), bias
        # Transformer Engine puts the norm's output last, and megatron-core a missing bias after it.
        output, *bias_and_norm = (*result[0], result[1]) if isinstance(result[0], tuple) else (*result[::2], result[1])
        normed, bias = bias_and_norm
        return change(normed, output), bias

    module.register_forward_hook(hook)


def _hook_before_norm(module: NormedRowParallelLinear, change: Any) -> None:
    """The layer normalizes its output inside: what adapters add comes before that."""
    read: list[Tensor] = []
    module.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    module.post_layernorm.register_forward_pre_hook(lambda _, inputs: (change(read.pop(), inputs[0]),))


def _has_fused_norm(module: nn.Module) -> bool:
    """Return whether a layer of Transformer Engine normalizes its input itself."""
    return "return_layernorm_output" in vars(module)


def _added_bias(module: Any) -> Tensor | None:
    """Return the bias that a layer adds to its output itself, None if it returns the bias or has none."""
    if isinstance(module, ColumnParallelLinear | RowParallelLinear):
        return None if module.skip_bias_add else module.bias
    return module.bias if module.use_bias and not module.te_return_bias else None
