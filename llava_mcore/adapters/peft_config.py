"""adapter_config.json, in which PEFT describes an adapter.

Key by key as peft 0.21 writes it; anything beyond plain LoRA, rsLoRA or DoRA is refused.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from llava_mcore.adapters.linear_layers import ModelLayers
from llava_mcore.adapters.peft_tensors import LORA_A, WEIGHTS, misfits, names_in_folder, open_weights
from llava_mcore.adapters.targets import LoraSettings, most_common
from llava_mcore.errors import ConversionError, problems
from llava_mcore.files.regular import read_object

logger = logging.getLogger(__name__)

CONFIG = "adapter_config.json"
KNOWN_KEYS = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "bias"),
    *("use_rslora", "use_dora", "modules_to_save", "init_lora_weights", "layers_to_transform", "layers_pattern"),
    *("rank_pattern", "alpha_pattern", "megatron_config", "megatron_core", "loftq_config", "qalora_group_size"),
    *("target_parameters", "eva_config", "corda_config", "lora_ga_config", "runtime_config"),
}
"""Keys that are read here, or that only say how an adapter was initialized or is stored. Others must be empty."""
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights with which PEFT leaves the model's own weights as they are."""


def plan_of_folder(folder: Path, name: str, layers: ModelLayers, *, is_trained: bool) -> LoraSettings:
    """Return the adapter of a PEFT folder. Its tensors say which layers it has, and of which ranks.

    Raises:
        ConversionError: not an adapter of this model, or of a kind that is not computed here.
    """
    config = read_object(folder / CONFIG, ConversionError)
    tensors = open_weights(folder).tensors
    # Tensors of layers whose output nothing uses.
    names = names_in_folder(tensors, layers)
    skipped = sorted(tensors.keys() - set(names.values()))
    if skipped:
        logger.info(
            "%s: %d tensors belong to layers that do not change the model's output and are skipped, such as %s",
            folder,
            len(skipped),
            skipped[0],
        )
    # The rank of each layer, from the shape of its A.
    shapes = {name: tuple(tensors[key].shape) for name, key in names.items()}
    lora_ranks = {name.removesuffix(LORA_A): shape[0] for name, shape in shapes.items() if name.endswith(LORA_A)}
    # Everything that does not fit, at once.
    errors = _not_supported(config)
    errors += [_cannot_adapt(name, layers) for name in lora_ranks if name not in layers.adaptable]
    errors += _other_experts(config, lora_ranks, layers)
    lora_ranks |= {name: r // x.experts for name, x in layers.expert_members.items() if (r := lora_ranks.get(name))}
    if not lora_ranks:
        errors.append(f"{WEIGHTS} holds no LoRA")
    plan = None if errors else _plan(config, name, lora_ranks, layers, is_trained=is_trained)
    if plan is not None:
        errors += misfits(shapes, plan, layers)
    if plan is None or errors:
        raise ConversionError(problems(f"{folder} cannot be used with this model", errors))
    return plan


def _other_experts(config: Mapping[str, Any], rows: Mapping[str, int], layers: ModelLayers) -> list[str]:
    """Return what says that an adapter is of a model with another number of experts. `rows`: of every A."""
    ranks, errors = _literal(config.get("rank_pattern") or {}), []
    for name, member in layers.expert_members.items():
        lora_rank = int(_by_pattern(ranks, name, config.get("r") or 8))
        if name in rows and rows[name] != lora_rank * member.experts:
            errors.append(
                f"{name}: its {rows[name]} rows at rank {lora_rank} are those of {rows[name] / lora_rank:g} experts, "
                f"and this model has {member.experts}"
            )
    return errors[:1]  # all layers have as many


def _cannot_adapt(name: str, layers: ModelLayers) -> str:
    """Return what is wrong with an adapter of another layer. PEFT finds it in this model only if its name is here."""
    if name in layers.module_names:
        return (
            f"{WEIGHTS} adapts {name}, which is not a linear layer of this model that can be adapted here: merge the "
            "adapter with PEFT (merge_and_unload) and import the model"
        )
    return (
        f"{WEIGHTS} adapts {name}, and this model has no module of that name, so PEFT would not apply it "
        "either: merge it into the model it was trained on (merge_and_unload); if that is a part of this model, "
        "build the model from the result (python -m llava_mcore build)"
    )


def _plan(
    config: Mapping[str, Any], name: str, lora_ranks: Mapping[str, int], layers: ModelLayers, *, is_trained: bool
) -> LoraSettings:
    default, patterns = config.get("lora_alpha", 8), _literal(config.get("alpha_pattern") or {})
    modules = tuple(_modules_to_save(config.get("modules_to_save") or (), layers))
    return LoraSettings(
        name=name,
        lora_ranks={module: lora_ranks[module] for module in layers.adaptable if module in lora_ranks},
        alphas={module: float(_by_pattern(patterns, module, default)) for module in lora_ranks},
        dropout=float(config.get("lora_dropout") or 0.0),
        dora=bool(config.get("use_dora")),
        rslora=bool(config.get("use_rslora")),
        bias=config.get("bias", "none"),
        modules_to_save=modules,
        is_trained=is_trained,
    )


def _not_supported(config: Mapping[str, Any]) -> list[str]:
    """Return the settings of an adapter that are not supported here."""
    kind = config.get("peft_type")
    if kind != "LORA":
        return [f"peft_type is {kind!r}, expected 'LORA'"]
    errors = [f"{key} = {value!r} is not supported" for key, value in config.items() if value and key not in KNOWN_KEYS]
    errors += [
        f"alpha_pattern has the pattern {key!r}; names and their ends are supported"
        for key in _literal(config.get("alpha_pattern") or {})
        if not re.fullmatch(r"[\w.]+", key)
    ]
    if changes_base(config):
        errors.append(
            f"init_lora_weights = {config['init_lora_weights']!r} changes the model's own weights, which are not in "
            "this folder: let PEFT convert it to plain LoRA (save_pretrained with "
            "path_initial_model_for_weight_conversion)"
        )
    if config.get("bias", "none") not in ("none", "all", "lora_only"):
        errors.append(f"bias = {config['bias']!r}, expected 'none', 'all' or 'lora_only'")
    return errors


def changes_base(config: Mapping[str, Any]) -> bool:
    """Return whether an adapter was initialized in a way that also changes the model's own weights."""
    start = config.get("init_lora_weights", True)
    return (start.lower() if isinstance(start, str) else start) not in PLAIN_STARTS


def _by_pattern(patterns: Mapping[str, Any], module: str, default: float) -> float:
    """Return the value of the first name that a module's name ends with, as PEFT chooses it."""
    return next((value for key, value in patterns.items() if f".{module}".endswith(f".{key}")), default)


def _literal(patterns: Mapping[str, Any]) -> dict[str, Any]:
    """Return patterns without the marks that names need in them; of equal ones the first counts. They are never used as
    patterns: an untrusted file could hold one that takes forever."""
    values: dict[str, Any] = {}
    for key, value in patterns.items():
        values.setdefault(key.removeprefix("^").replace("\\.", "."), value)
    return values


def _modules_to_save(names: Iterable[str], layers: ModelLayers) -> list[str]:
    return [module for name in names for module in sorted(layers.module_names) if module.endswith(name)]


def write_config(
    folder: Path, plan: LoraSettings, layers: ModelLayers, base: str | None, model_class: type[PreTrainedModel]
) -> None:
    """Write adapter_config.json.

    Args:
        model_class: class of the model that is adapted.
        base: Hugging Face folder, or name on the hub, of the model that is adapted.
    """
    path = folder / CONFIG
    path.write_text(json.dumps(peft_config(plan, layers, base, model_class), indent=2) + "\n", encoding="utf-8")


def peft_config(
    plan: LoraSettings, layers: ModelLayers, base: str | None, model_class: type[PreTrainedModel]
) -> dict[str, Any]:
    """Return the contents of adapter_config.json."""
    alpha = most_common(plan.alphas.values())
    return {
        "peft_type": "LORA",
        "task_type": None,
        # AutoPeftModel opens the base model with it, because no task type of PEFT is that of these classes.
        "auto_mapping": {"base_model_class": model_class.__name__, "parent_library": model_class.__module__},
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": plan.usual_lora_rank,
        "lora_alpha": _as_integer(alpha),
        "lora_dropout": plan.dropout,
        "target_modules": target_modules(plan, layers),
        "target_parameters": [name for name in plan.lora_ranks if name in layers.expert_members] or None,
        "rank_pattern": {name: r for name, r in plan.lora_ranks.items() if r != plan.usual_lora_rank},
        "alpha_pattern": {name: _as_integer(x) for name, x in plan.alphas.items() if x != alpha},
        "bias": plan.bias,
        "use_rslora": plan.rslora,
        "use_dora": plan.dora,
        "modules_to_save": list(plan.modules_to_save) or None,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }


def target_modules(plan: LoraSettings, layers: ModelLayers) -> list[str]:
    """Return names by which PEFT finds exactly the adapted layers: their last parts, if no other module has these."""
    adapted = [name for name in plan.lora_ranks if name in layers.members]
    ends = sorted({name.rpartition(".")[2] for name in adapted})
    matched = {name for name in layers.module_names if name.rpartition(".")[2] in ends}
    saved = tuple(f"{name}." for name in plan.modules_to_save)
    exact = (
        {name for name in matched if not f"{name}.".startswith(saved)} == set(adapted)
        if saved
        else (matched == set(adapted))
    )
    return ends if exact else adapted


def _as_integer(value: float) -> float | int:
    return int(value) if value == int(value) else value
