"""A model's adapters as parameters: new ones, those of PEFT folders and checkpoints, and how checkpoints hold them."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from torch import Tensor, nn
from torch.nn import Parameter

from llava_mcore.adapters.expert_factors import ExpertFactors, sharded_factor
from llava_mcore.adapters.linear_layers import HfLinear, ModelLayers
from llava_mcore.adapters.lora import Division, Factors
from llava_mcore.adapters.peft_tensors import LORA_A, LORA_B, MAGNITUDE, names_in_folder, open_weights
from llava_mcore.adapters.targets import LoraSettings, trained_parameters
from llava_mcore.checkpoint.dist import fill_model, load_state, model_state
from llava_mcore.checkpoint.fp8_scales import EXTRA_STATE
from llava_mcore.checkpoint.node_local import is_local, load_local
from llava_mcore.checkpoint.sharded import each_layer_apart
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.models.trainable import whole_name, whole_names
from llava_mcore.parallel.groups import Groups
from llava_mcore.weights.layouts import PadRows

CHILD = "adapters"
"""Name of a part's adapters beside its own modules: language_model.adapters.NAME.layers.0.self_attn.q_proj.lora_A."""


class Adapters(nn.Module):
    """The adapters of one part of the model, by name, each a tree of Hugging Face's module names."""

    def add(self, adapter: str, key: str, factors: Factors | ExpertFactors) -> None:
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
            of_experts = sharded_factor(key, parameter)
            if of_experts is not None:
                state[key] = of_experts
            elif marks["tensor_model_parallel"]:
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


def adapter_state(
    models: Sequence[VisionLanguageModel], own_names: Collection[str], *, is_loading: bool
) -> ShardedStateDict:
    """Return the sharded state of a rank's chunks without the frozen model. `own_names`: see `own_parameters`."""
    adapter_states = {}
    for (key, state), model in zip(model_state(models, is_loading=is_loading).items(), models, strict=True):
        names = (name for name, _ in model.named_parameters())
        saved_names = {name for name in names if is_adapter(name) or whole_name(model, name) in own_names}
        adapter_states[key] = each_layer_apart(
            {name: x for name, x in state.items() if name in saved_names or name.endswith(EXTRA_STATE)}
        )
    return adapter_states


def load_adapters(
    models: Sequence[VisionLanguageModel], checkpoint: Path, own_names: Collection[str], rank: int
) -> None:
    """Fill adapters, and the model's own parameters that belong to them, from a checkpoint; a collective call.

    Raises:
        CheckpointError: it holds other ones.
    """
    expected = adapter_state(models, own_names, is_loading=True)
    loaded = load_local(expected, checkpoint, rank) if is_local(checkpoint) else load_state(expected, checkpoint)
    for i, model in enumerate(models):
        fill_model(model, loaded.get(f"model{i}", {}), partial=True)


@torch.no_grad()
def load_peft_folder(
    models: Sequence[VisionLanguageModel], folder: Path, plan: LoraSettings, layers: ModelLayers, groups: Groups
) -> None:
    """Fill one adapter, and the modules and biases that were trained beside it. `plan`: `plan_of_folder`'s."""
    tensors = _Tensors(folder, layers)
    for model in models:
        modules = dict(model.named_modules())
        for name in plan.lora_ranks:
            member = layers.adaptable[name]
            factors = modules.get(f"{member.part}.{CHILD}.{plan.name}.{member.key}")
            if isinstance(factors, Factors):
                _put(tensors.get(f"{name}{LORA_A}"), [factors.lora_A], groups)
                _put(tensors.get(f"{name}{LORA_B}"), list(factors.lora_B), groups)
                if plan.dora:
                    _put(tensors.get(f"{name}{MAGNITUDE}"), list(factors.magnitude), groups)
            if isinstance(factors, ExpertFactors):
                factors.fill(tensors.get(f"{name}{LORA_A}"), tensors.get(f"{name}{LORA_B}"))
        _load_trained(model, tensors, plan, layers, groups)


def _load_trained(
    model: VisionLanguageModel, tensors: _Tensors, plan: LoraSettings, layers: ModelLayers, groups: Groups
) -> None:
    """Fill the parameters of the model itself that were trained with the adapter."""
    trained = trained_parameters(plan, layers)
    for name, parameter in whole_names(model).items():
        if not trained.get(name, False):
            continue
        entry = layers.entries[name]
        full = entry.to_megatron({x: tensors.get(x) for x in entry.hf_names})
        tp_size = 1 if model.has_whole(name) else groups.tp_size
        if isinstance(entry.layout, PadRows):  # the vocabulary, whose rows the layout pads before it divides them
            full = PadRows(full.shape[0], parameter.shape[0] * tp_size).to_megatron(full)
        parameter.copy_(entry.shard.split(full, tp_size)[groups.tp_rank if tp_size > 1 else 0])


def _put(tensor: Tensor, parameters: Sequence[Parameter], groups: Groups) -> None:
    """Copy a tensor, or this rank's parts of it, into the parameters, which are blocks of its rows.

    Parameters of padded layers are larger than it: the rest becomes zero.
    """
    dims = [vars(p)["partition_dim"] if vars(p)["tensor_model_parallel"] else None for p in parameters]
    sizes = [p.shape[0] * (groups.tp_size if dim == 0 else 1) for p, dim in zip(parameters, dims, strict=True)]
    columns = [n * groups.tp_size if dims[0] == 1 else n for n in parameters[0].shape[1:]]
    full = tensor.new_zeros(sum(sizes), *columns)
    full[tuple(slice(size) for size in tensor.shape)] = tensor
    for block, parameter, dim in zip(full.split(sizes), parameters, dims, strict=True):
        parameter.copy_(block if dim is None else block.chunk(groups.tp_size, dim)[groups.tp_rank])


class _Tensors:
    """The folder's tensors under the names that transformers' model has now."""

    def __init__(self, folder: Path, layers: ModelLayers) -> None:
        self._file = open_weights(folder)
        self._names = names_in_folder(self._file.tensors, layers)

    def get(self, name: str) -> Tensor:
        return self._file.get(self._names[name])
