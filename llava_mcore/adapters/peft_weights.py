"""Fills an adapter of a model from a PEFT folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from llava_mcore.adapters.factors import CHILD
from llava_mcore.adapters.linear_layers import ModelLayers
from llava_mcore.adapters.lora import Factors
from llava_mcore.adapters.peft_tensors import LORA_A, LORA_B, MAGNITUDE, names_in_folder, open_weights
from llava_mcore.adapters.targets import LoraSettings, trained_parameters
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.models.trainable import whole_names
from llava_mcore.parallel.groups import Groups
from llava_mcore.weights.layouts import PadRows


@torch.no_grad()
def load_peft_folder(
    models: Sequence[VisionLanguageModel], folder: Path, plan: LoraSettings, layers: ModelLayers, groups: Groups
) -> None:
    """Fill one adapter, and the modules and biases that were trained beside it. `plan`: `plan_of_folder`'s."""
    tensors = _Tensors(folder, layers)
    for model in models:
        modules = dict(model.named_modules())
        for name in plan.lora_ranks:
            member = layers.members[name]
            factors = modules.get(f"{member.part}.{CHILD}.{plan.name}.{member.key}")
            if isinstance(factors, Factors):
                _put(tensors.get(f"{name}{LORA_A}"), [factors.lora_A], groups)
                _put(tensors.get(f"{name}{LORA_B}"), list(factors.lora_B), groups)
                if plan.dora:
                    _put(tensors.get(f"{name}{MAGNITUDE}"), list(factors.magnitude), groups)
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
