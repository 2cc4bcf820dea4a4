"""Export of a checkpoint's adapters: as PEFT's tensors, or merged into the model's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import PretrainedConfig

from llava_mcore.adapters.adapter_record import Base, read_base, read_plans
from llava_mcore.adapters.attach import attach_adapters
from llava_mcore.adapters.expert_factors import ExpertFactors
from llava_mcore.adapters.factors import CHILD, is_adapter, load_adapters
from llava_mcore.adapters.linear_layers import WEIGHT, HfLinear, ModelLayers, model_layers
from llava_mcore.adapters.lora import Factors
from llava_mcore.adapters.peft_tensors import BASE_LAYER, LORA_A, LORA_B, MAGNITUDE, PREFIX, factor_name
from llava_mcore.adapters.targets import LoraSettings, own_parameters
from llava_mcore.checkpoint.dist import stored_tensors
from llava_mcore.checkpoint.layout import hf_folder
from llava_mcore.convert.io.parameters import meta_model
from llava_mcore.convert.megatron_weights import EMBEDDING, OUTPUT
from llava_mcore.errors import ConversionError
from llava_mcore.files.hf_folder import HfFolder
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.language.families.registry import embedding_rows
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.models.trainable import whole_name, whole_names
from llava_mcore.parallel.groups import single_process
from llava_mcore.weights.table import MappingTable


@dataclass(frozen=True)
class Matrices:
    """One adapter on one Hugging Face layer: A [r, h], B [o, r], the factor, DoRA's magnitudes [o] or None; fp32."""

    A: Tensor
    B: Tensor
    scaling: float
    magnitude: Tensor | None = None


@torch.no_grad()
def merged(weight: Tensor, adapters: Iterable[Matrices]) -> Tensor:
    """Return a weight [o, h] with adapters added one after the other, in its own dtype."""
    result = weight.clone()
    for adapter in adapters:
        delta = adapter.B @ adapter.A * adapter.scaling
        if adapter.magnitude is None:
            result += delta
            continue
        norm = torch.linalg.norm(weight + delta, dim=1)
        result = ((adapter.magnitude / norm).view(-1, 1) * (result + delta)).to(weight.dtype)
    return result


@dataclass(frozen=True)
class CheckpointAdapters:
    """The adapters of one iteration, and parameters of the model that were trained with them.

    `model` has memory for nothing else. `base`: the weights they belong to.
    """

    hf: PretrainedConfig
    layers: ModelLayers
    plans: tuple[LoraSettings, ...]
    base: Base
    model: VisionLanguageModel
    dtype: torch.dtype
    """That the adapters were saved in; in `model` they are fp32."""

    @classmethod
    def open(cls, checkpoint: Path) -> CheckpointAdapters:
        """Load them; whatever layout has saved them.

        Raises:
            CheckpointError, ConversionError: damaged, or of another model.
        """
        hf = load_hf_config(hf_folder(checkpoint))
        layers = model_layers(hf)
        plans = read_plans(checkpoint, layers)
        stored = stored_tensors(checkpoint)
        rows = next((stored[key].global_shape[0] for key in (EMBEDDING, OUTPUT) if key in stored), None)
        with single_process():
            model = meta_model(hf, num_vocab_rows=rows or embedding_rows(hf))
            own_names = own_parameters(plans, layers)
            _allocate(model, own_names)
            attach_adapters(model, plans, layers, tp_size=1, tp_rank=0, seed=0)
            load_adapters([model], checkpoint, own_names, rank=0)
        dtype = next(x.dtype for key, x in stored.items() if is_adapter(key))
        return cls(hf, layers, plans, read_base(checkpoint), model, dtype)

    def plan(self, name: str | None) -> LoraSettings:
        """Return the adapter of a name, None: the trained one. ConversionError if there is none of that name."""
        names = [plan.name for plan in self.plans]
        if name is not None and name not in names:
            raise ConversionError(f"--adapter {name}: the checkpoint has {', '.join(names)}")
        return self.plans[0 if name is None else names.index(name)]

    def peft_tensors(self, plan: LoraSettings, factors: Mapping[str, float]) -> dict[str, Tensor]:
        """Return one adapter's tensors as PEFT names them. `factors`: of each layer's B."""
        tensors_by_name = {}
        for name in plan.lora_ranks:
            matrices = self._matrices(plan, name)
            tensors_by_name[factor_name(name, LORA_A)] = matrices.A
            tensors_by_name[factor_name(name, LORA_B)] = matrices.B * factors[name]
            if matrices.magnitude is not None:
                tensors_by_name[PREFIX + name + MAGNITUDE] = matrices.magnitude
        for parameter, tensors in self._own_tensors(plan).items():
            names = self.layers.entries[parameter].hf_names
            tensors_by_name |= {_peft_name(name, plan): x for name, x in zip(names, tensors, strict=True)}
        return {name: x.detach().to(self.dtype).contiguous() for name, x in tensors_by_name.items()}

    def merged_tensors(self, weights: HfFolder, table: MappingTable) -> Iterator[tuple[str, Tensor]]:
        """Yield name and data of every tensor that adapters, or training beside them, have changed.

        Args:
            weights: the base's, in a Hugging Face folder.
            table: of that folder.
        """
        for linear in self.layers.linears:
            for member, name in zip(linear.members, table.entries[linear.name + WEIGHT].hf_names, strict=True):
                adapters = [self._matrices(plan, member.name) for plan in self.plans if member.name in plan.lora_ranks]
                if adapters:
                    yield name, merged(weights.get(name), adapters)
        yield from self._merged_experts(weights, table)
        own_tensors = {name: tensors for plan in self.plans for name, tensors in self._own_tensors(plan).items()}
        for parameter, tensors in own_tensors.items():
            names = table.entries[parameter].hf_names
            yield from ((name, x.to(weights.where(name).dtype)) for name, x in zip(names, tensors, strict=True))

    def _merged_experts(self, weights: HfFolder, table: MappingTable) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of experts that adapters have changed, in the form that the folder has them in."""
        for tensor in self.layers.expert_tensors:
            (member,) = tensor.members
            plans = [plan for plan in self.plans if member.name in plan.lora_ranks]
            if not plans:
                continue
            entry = table.entries[tensor.name + WEIGHT]
            stacked = entry.to_megatron({name: weights.get(name) for name in entry.hf_names}).clone()
            for plan in plans:
                factors = self._factors(plan, member)
                assert isinstance(factors, ExpertFactors)
                # As PEFT computes it, to the bit.
                delta = torch.einsum("o r e, e r i -> e o i", factors.lora_B.permute(1, 2, 0), factors.lora_A)
                stacked += delta * plan.scaling(member.name)
            yield from zip(entry.hf_names, entry.layout.to_hf(stacked), strict=True)

    def _own_tensors(self, plan: LoraSettings) -> dict[str, tuple[Tensor, ...]]:
        """Return the model's own parameters that belong to an adapter: Megatron's name, and the Hugging Face
        tensors."""
        own_names = own_parameters([plan], self.layers)
        return {
            name: self.layers.entries[name].layout.to_hf(parameter.detach())
            for name, parameter in whole_names(self.model).items()
            if name in own_names
        }

    def _matrices(self, plan: LoraSettings, name: str) -> Matrices:
        member = self.layers.adaptable[name]
        factors = self._factors(plan, member)
        if isinstance(factors, ExpertFactors):
            return Matrices(*factors.to_peft(), plan.scaling(name))
        assert isinstance(factors, Factors)
        # Hugging Face's layers have no padding.
        A, B = factors.lora_A[:, : member.inputs], torch.cat(list(factors.lora_B))[: member.outputs]
        lengths = torch.cat(list(factors.magnitude))[: member.outputs] if plan.dora else None
        return Matrices(A, B, plan.scaling(name), lengths)

    def _factors(self, plan: LoraSettings, member: HfLinear) -> nn.Module:
        return self.model.get_submodule(f"{member.part}.{CHILD}.{plan.name}.{member.key}")


def _allocate(model: VisionLanguageModel, own_names: Collection[str]) -> None:
    """Give memory to the parameters that belong to adapters, in a model that has none."""
    for name, parameter in list(model.named_parameters()):
        if whole_name(model, name) in own_names:
            owner, _, last = name.rpartition(".")
            allocated = Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
            vars(allocated).update(vars(parameter))
            model.get_submodule(owner).register_parameter(last, allocated)


def _peft_name(name: str, plan: LoraSettings) -> str:
    """Return PEFT's name of a parameter of the model: adapted layers are wrapped."""
    module, _, last = name.rpartition(".")
    return f"{PREFIX}{module}{BASE_LAYER if module in plan.lora_ranks else '.'}{last}"
