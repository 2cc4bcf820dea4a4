"""The part of a PEFT adapter that vLLM computes beside its model, and an export that it computes as PEFT does.

vLLM multiplies every layer's B A by one number, lora_alpha / r (rsLoRA: / √r) of adapter_config.json; PEFT also reads
rank_pattern and alpha_pattern.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llava_mcore.adapters.peft_config import KNOWN_KEYS, changes_base
from llava_mcore.adapters.targets import LoraSettings, most_common

_EQUAL = 1e-9  # relative difference of two scales that count as one
_MAX_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's --max-lora-rank."""


def with_one_scale(plan: LoraSettings, *, may_change_b: bool) -> tuple[LoraSettings, dict[str, float]]:
    """Return the plan with alphas that give all layers one scale, and the factors of their B that make up for it.

    Factors are powers of two, which change no bit of B but the exponent. Where others would be needed, or B may not
    change, plan and B stay as they are.
    """
    unchanged = plan, dict.fromkeys(plan.lora_ranks, 1.0)
    scale = most_common(plan.scaling(name) for name, r in plan.lora_ranks.items() if r == plan.usual_lora_rank)
    factors = {name: _power_of_two(plan.scaling(name) / scale) if scale else None for name in plan.lora_ranks}
    exact = {name: factor for name, factor in factors.items() if factor is not None}
    if not may_change_b or len(exact) < len(factors):
        return unchanged
    alphas = {name: scale * (math.sqrt(r) if plan.rslora else r) for name, r in plan.lora_ranks.items()}
    # A product and a quotient by a root need not cancel: close to a whole number, an alpha is one.
    rounded = {name: round(x) if math.isclose(x, round(x), rel_tol=_EQUAL) else x for name, x in alphas.items()}
    return replace(plan, alphas={name: float(x) for name, x in rounded.items()}), exact


def _power_of_two(value: float) -> float | None:
    """Return the power of two that a number is, or None."""
    if value <= 0:
        return None
    power = 2.0 ** round(math.log2(value))
    return power if math.isclose(value, power, rel_tol=_EQUAL) else None


def vllm_problems(config: Mapping[str, Any]) -> list[str]:
    """Return what vLLM refuses of an adapter, or computes differently than PEFT. `config`: its adapter_config.json."""
    # Other kinds, and settings that vLLM does not know.
    if config.get("peft_type") != "LORA":
        return [f"it is {config.get('peft_type')} (peft_type), and vLLM computes LORA only"]
    errors = [
        f"it was trained with {key} = {value!r}, which vLLM does not read"
        for key, value in config.items()
        if value and key not in KNOWN_KEYS
    ]
    if changes_base(config):
        errors.append(
            f"init_lora_weights = {config['init_lora_weights']!r} changes the model's own weights, and vLLM uses them "
            "unchanged"
        )
    # What vLLM knows and refuses, or leaves out.
    if config.get("use_dora"):
        errors.append("it is DoRA (use_dora), which vLLM refuses")
    if config.get("modules_to_save"):
        modules = ", ".join(map(str, config["modules_to_save"]))
        errors.append(f"{modules} were trained in full (modules_to_save), which vLLM refuses")
    if config.get("bias", "none") != "none":
        errors.append(f"biases were trained (bias = {config['bias']!r}), which vLLM does not read")
    if config.get("target_parameters"):
        errors.append("it adapts experts (target_parameters), which vLLM does not read")
    # Limits of rank and scale.
    if vllm_rank(config) > _MAX_LORA_RANKS[-1]:
        errors.append(f"its rank is {vllm_rank(config)}, and vLLM's --max-lora-rank is at most {_MAX_LORA_RANKS[-1]}")
    scales = _scales(config)
    if len(scales) > 1:
        scale_list = " and ".join(f"{x:g}" for x in sorted(scales))
        errors.append(
            f"its layers are scaled by {scale_list} (rank_pattern, alpha_pattern); vLLM scales all by one number"
        )
    return errors


def vllm_rank(config: Mapping[str, Any]) -> int:
    """Return the --max-lora-rank that vLLM needs for an adapter; a larger rank than it takes is returned as it is."""
    largest = max([int(config.get("r") or 8), *map(int, (config.get("rank_pattern") or {}).values())])
    return next((limit for limit in _MAX_LORA_RANKS if limit >= largest), largest)


def _scales(config: Mapping[str, Any]) -> set[float]:
    """Return the scales of the layers that patterns name, and of those that none does."""
    lora_ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    default_lora_rank, default_alpha = config.get("r") or 8, config.get("lora_alpha") or 8
    root = math.sqrt if config.get("use_rslora") else float
    scales: list[float] = [default_alpha / root(default_lora_rank)]
    for name in [*lora_ranks, *alphas]:
        scale = alphas.get(name, default_alpha) / root(lora_ranks.get(name, default_lora_rank))
        if not any(math.isclose(scale, other, rel_tol=_EQUAL) for other in scales):
            scales.append(scale)
    return set(scales)
