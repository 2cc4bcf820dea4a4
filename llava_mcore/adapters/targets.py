"""Which layers get an adapter, of which rank: from the configuration, by PEFT's rules for names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from llava_mcore.adapters.linear_layers import BIAS, HfLinear, ModelLayers
from llava_mcore.config.sections.adapter import ALL_LINEAR, RANK_KEYS, AdapterConfig
from llava_mcore.errors import ConfigError, problems

_MOST_NAMES = 16  # maximum number of names in a message


@dataclass(frozen=True)
class LoraSettings:
    """One adapter. Names are those of modules in transformers' model.

    `lora_ranks`: of every layer that it adapts; `alphas` likewise. `bias`, `modules_to_save`: which of the model's own
    parameters are trained. `is_trained` False: it works as it is.
    """

    name: str
    lora_ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    dropout: float = 0.0
    dora: bool = False
    rslora: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    modules_to_save: tuple[str, ...] = ()
    is_trained: bool = True

    @property
    def usual_lora_rank(self) -> int:
        """Return the rank that most layers have; of equally frequent ones the first."""
        return most_common(self.lora_ranks.values())

    def factor_shapes(self, linear: HfLinear) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of A and B on a layer of transformers' model, of all experts if it is a tensor of them."""
        lora_rank = self.lora_ranks[linear.name] * max(1, linear.experts)
        return (lora_rank, linear.inputs), (linear.outputs, lora_rank)

    def scaling(self, module: str) -> float:
        """Return the factor of what the adapter adds to a layer's output."""
        lora_rank = self.lora_ranks[module]
        return self.alphas[module] / (math.sqrt(lora_rank) if self.rslora else lora_rank)


def most_common[T](values: Iterable[T]) -> T:
    """Return the most frequent value, of equally frequent ones the first."""
    listed = list(values)
    return max(listed, key=listed.count)


def plan_from_config(adapter: AdapterConfig, layers: ModelLayers) -> LoraSettings:
    """Return the adapter that the configuration asks for.

    Raises:
        ConfigError: lists every name that no layer has, and layers that cannot be adapted.
    """
    # Modules that are trained in full; their layers get no adapter.
    errors: list[str] = []
    saved = {name: tuple(_matching(name, layers.module_names)) for name in adapter.modules_to_save}
    errors += [_unknown_module(name, layers) for name, modules in saved.items() if not modules]
    modules = tuple(dict.fromkeys(module for matching in saved.values() for module in matching))
    errors += _tied(modules, layers)
    # Layers by target, each with the rank of its part.
    ranks = adapter.ranks
    of_experts = ranks.pop("experts", None)
    chosen: dict[str, int] = {}
    for target in adapter.targets if ranks else ():
        members = layers.members if target == ALL_LINEAR else _matching(target, layers.members)
        free = {name: layers.members[name].part for name in members if not _inside(name, modules)}
        with_lora_rank = {name: ranks[part] for name, part in free.items() if part in ranks}
        if not with_lora_rank:
            errors.append(_nothing_to_adapt(target, free.values(), layers))
        chosen |= with_lora_rank
    # A rank without any layer would have no effect.
    for part, lora_rank in ranks.items():
        if not errors and not any(layers.members[name].part == part for name in chosen):
            errors.append(
                f"{RANK_KEYS[part]} {lora_rank}: --lora-targets {','.join(adapter.targets)} has no layer in that part"
            )
    if of_experts is not None:
        chosen |= dict.fromkeys(layers.expert_members, of_experts)
        if not layers.expert_members:
            errors.append(f"{RANK_KEYS['experts']}: the model has no experts")
    if errors:
        raise ConfigError(problems("this model cannot get such an adapter", errors))
    return LoraSettings(
        name=adapter.name,
        lora_ranks={name: chosen[name] for name in layers.adaptable if name in chosen},
        alphas=dict.fromkeys(chosen, float(adapter.alpha)),
        dropout=adapter.dropout,
        dora=adapter.dora,
        rslora=adapter.rslora,
        bias=adapter.bias,
        modules_to_save=modules,
    )


def own_parameters(plans: Iterable[LoraSettings], layers: ModelLayers) -> frozenset[str]:
    """Return the parameters of the model itself, by their Megatron names, that adapters have values of their own for.

    Raises:
        ConfigError: two adapters have values for the same one.
    """
    owners: dict[str, str] = {}
    shared: dict[tuple[str, str], str] = {}
    for plan in plans:
        for name, is_trained in trained_parameters(plan, layers).items():
            if is_trained and owners.setdefault(name, plan.name) != plan.name:
                shared.setdefault((owners[name], plan.name), name)
    if shared:
        conflicts = [f"{a} and {b} both have {name}" for (a, b), name in shared.items()]
        title = "adapters with values for the same parameters cannot be combined: merge one into the model first"
        raise ConfigError(problems(f"{title} (export-hf --merge)", conflicts))
    return frozenset(owners)


def trained_parameters(plan: LoraSettings, layers: ModelLayers) -> dict[str, bool]:
    """Return for every parameter of the model itself, by its Megatron name, whether it is trained with the adapter.

    Raises:
        ConfigError: only a part of one of our parameters would be trained, or experts would be.
    """
    experts = [
        x.name for x in layers.parameters if layers.entries[x.megatron].shard.experts and _is_trained(x.name, plan)
    ]
    if experts:
        raise ConfigError(
            f"--lora-modules-to-save: experts are not trained beside adapters, and {experts[0]} is of that kind: name "
            "other modules, or train the model without adapters"
        )
    trained: dict[str, bool] = {}
    divided: dict[str, list[str]] = {}
    for parameter in layers.parameters:
        value = _is_trained(parameter.name, plan)
        if trained.setdefault(parameter.megatron, value) != value:
            divided.setdefault(parameter.megatron, []).append(parameter.name)
    if divided:
        names = [x.name for x in layers.parameters if x.megatron == next(iter(divided))]
        more = f" (and {len(divided) - 1} parameters like it)" if len(divided) > 1 else ""
        raise ConfigError(
            f"--lora-modules-to-save and adapter.bias: {', '.join(names)} are one parameter here{more}, so choose all "
            "of them, or none"
        )
    return trained


def _is_trained(name: str, plan: LoraSettings) -> bool:
    module = name.rpartition(".")[0]
    if _inside(module, plan.modules_to_save):
        return True
    if not name.endswith(BIAS) or plan.bias == "none":
        return False
    return plan.bias == "all" or module in plan.lora_ranks


def _inside(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _matching(target: str, names: Iterable[str]) -> list[str]:
    """Return the modules of this name, or whose name ends with it."""
    return [name for name in names if name == target or name.endswith(f".{target}")]


def _nothing_to_adapt(target: str, parts: Iterable[str], layers: ModelLayers) -> str:
    """Say why a target selects no layer. `parts`: of the layers that it names."""
    if keys := dict.fromkeys(RANK_KEYS[part] for part in parts):
        return f"--lora-targets {target}: its layers have no rank; give {' or '.join(keys)}"
    if _matching(target, layers.module_names):
        return (
            f"--lora-targets {target}: no linear layer that can be adapted here; to train it in full, name it with "
            "--lora-modules-to-save"
        )
    ends = dict.fromkeys(name.rpartition(".")[2] for name in layers.members)
    return f"--lora-targets {target}: the model has no such linear layer; it has {', '.join(list(ends)[:_MOST_NAMES])}"


def _unknown_module(name: str, layers: ModelLayers) -> str:
    examples = [x for x in sorted(layers.module_names) if x.count(".") <= 1]
    return f"--lora-modules-to-save {name}: the model has no such module; it has {', '.join(examples[:_MOST_NAMES])}"


def _tied(modules: Iterable[str], layers: ModelLayers) -> Iterator[str]:
    """Yield modules that are one with another module, which would have to be trained and saved apart from it."""
    for module in modules:
        if layers.is_tied and module.endswith(("embed_tokens", "lm_head")):
            yield f"--lora-modules-to-save {module}: the model has one matrix for embedding and output layer: omit it"
