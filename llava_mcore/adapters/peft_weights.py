"""The tensors of a PEFT folder in a model that has the folder's adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from llava_mcore.adapters.factors import CHILD
from llava_mcore.adapters.layers import ModelLayers
from llava_mcore.adapters.lora import Factors
from llava_mcore.adapters.peft_config import BASE_LAYER, LORA_A, LORA_B, MAGNITUDE, PREFIX, WEIGHTS, aliases
from llava_mcore.adapters.plan import LoraPlan, trained_parameters
from llava_mcore.errors import ConversionError, problems
from llava_mcore.files.hf_folder import HfFolder
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.models.trainable import whole_names
from llava_mcore.parallel.groups import Groups


@torch.no_grad()
def load_peft_folder(
    models: Sequence[VisionLanguageModel], folder: Path, plan: LoraPlan, layers: ModelLayers, groups: Groups
) -> None:
    """Fill one adapter, and the modules and biases that were trained beside it, from a PEFT folder.

    Raises:
        ConversionError: lists tensors that are missing, have another shape, or have no counterpart here.
    """
    tensors = _Tensors(folder, layers)
    for model in models:
        modules = dict(model.named_modules())
        for name in plan.ranks:
            member = layers.members[name]
            factors = modules.get(f"{member.part}.{CHILD}.{plan.name}.{member.key}")
            if isinstance(factors, Factors):
                tensors.put(f"{name}{LORA_A}", [factors.lora_A], groups)
                tensors.put(f"{name}{LORA_B}", list(factors.lora_B), groups)
                if plan.dora:
                    tensors.put(f"{name}{MAGNITUDE}", list(factors.magnitude), groups)
        _load_trained(model, tensors, plan, layers, groups)
    used = {f"{name}{end}" for name in plan.ranks for end in (LORA_A, LORA_B, *([MAGNITUDE] if plan.dora else []))}
    used |= set(_trained_names(plan, layers))
    tensors.check(used)


def _trained_names(plan: LoraPlan, layers: ModelLayers) -> list[str]:
    trained = trained_parameters(plan, layers)
    return [x.name for x in layers.parameters if trained[x.megatron]]


def _load_trained(
    model: VisionLanguageModel, tensors: _Tensors, plan: LoraPlan, layers: ModelLayers, groups: Groups
) -> None:
    """Fill the parameters of the model itself that were trained with the adapter."""
    trained = trained_parameters(plan, layers)
    for name, parameter in whole_names(model).items():
        if not trained.get(name, False):
            continue
        entry = layers.entries[name]
        found = {x: tensors.get(x) for x in entry.hf_names}
        complete = {x: tensor for x, tensor in found.items() if tensor is not None}
        if len(complete) == len(found):
            full = entry.to_megatron(complete)
            is_divided = not model.has_whole(name)
            local = entry.shard.split(full, groups.tp_size)[groups.tp_rank] if is_divided else full
            rows = parameter.shape[0] - local.shape[0]  # of a padded vocabulary, on the last rank
            parameter.copy_(torch.nn.functional.pad(local, (0, 0) * (local.ndim - 1) + (0, rows)))


class _Tensors:
    """The folder's tensors under the names that transformers' model has now."""

    def __init__(self, folder: Path, layers: ModelLayers) -> None:
        self.folder = HfFolder.of_file(folder / WEIGHTS)
        self.names = dict(_renamed(self.folder.tensors, layers))
        self.found: list[str] = []

    def get(self, name: str) -> Tensor | None:
        """Return a tensor; a missing one is noted."""
        if name not in self.names:
            self.found.append(f"{name} is missing")
            return None
        return self.folder.get(self.names[name])

    def put(self, name: str, parameters: Sequence[Parameter], groups: Groups) -> None:
        """Copy a tensor, or this rank's parts of it, into the parameters, which are blocks of its rows."""
        tensor = self.get(name)
        if tensor is None:
            return
        dims = [vars(p)["partition_dim"] if vars(p)["tensor_model_parallel"] else None for p in parameters]
        sizes = [p.shape[0] * (groups.tp_size if dim == 0 else 1) for p, dim in zip(parameters, dims, strict=True)]
        first = parameters[0]
        rest = [n * (groups.tp_size if dims[0] == i else 1) for i, n in enumerate(first.shape) if i > 0]
        if list(tensor.shape) != [sum(sizes), *rest]:
            self.found.append(f"{name} is {tuple(tensor.shape)}, expected {(sum(sizes), *rest)}")
            return
        for block, parameter, dim in zip(tensor.split(sizes), parameters, dims, strict=True):
            parameter.copy_(block if dim is None else block.chunk(groups.tp_size, dim)[groups.tp_rank])

    def check(self, used: set[str]) -> None:
        """Raise ConversionError for tensors that are missing, do not fit, or have no counterpart."""
        found = [*self.found, *(f"{name} has no counterpart here" for name in sorted(self.names.keys() - used))]
        if found:
            raise ConversionError(problems(f"{self.folder.path} does not fit this model", found))


def _renamed(tensors: Mapping[str, object], layers: ModelLayers) -> dict[str, str]:
    """Map each tensor's name in today's transformers to its name in the folder."""
    modules = aliases(layers) | layers.parameter_aliases
    found = {}
    for key in tensors:
        name = key.removeprefix(PREFIX).replace(BASE_LAYER, ".")
        end = next((end for end in (LORA_A, LORA_B, MAGNITUDE) if name.endswith(end)), "")
        module = name.removesuffix(end) if end else name
        found[modules.get(module, module) + end] = key
    return found
