"""FP8's scales in checkpoints: plain tensors instead of Transformer Engine's pickles.

With delayed scaling each linear layer keeps the largest values of the last steps and the scales computed from them.
Transformer Engine (2.20) returns them as a pickle in the layer's extra state, and refuses to load a pickle, which could
execute code. All other extra state is empty.
"""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.fp8_utils import get_fp8_recipe
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

logger = logging.getLogger(__name__)

EXTRA_STATE = "_extra_state"

Scales = Mapping[str, list[Tensor]]
"""scaling_fwd and scaling_bwd: each layer's scales [tensors] and its history of largest values [steps, tensors]."""


class ScaledModule(Protocol):
    """The methods of a Transformer Engine module that are used here."""

    fp8_meta: dict[str, Any]

    def get_fp8_meta_tensors(self) -> Scales | None: ...
    def reset_fp8_meta_tensors(self, fp8_meta_tensors: Scales | None = None) -> None: ...
    def init_fp8_meta_tensors(self, recipe: Any) -> None: ...


def scaled_modules(model: MegatronModule) -> dict[str, ScaledModule]:
    """Return the modules that may have scales, by name: those of the parts that use delayed scaling."""
    parts = parts_with_scales(model)
    if not parts:
        return {}
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule  # on GPUs only

    return {
        f"{name}.{inner}": x
        for name, part in parts.items()
        for inner, x in part.named_modules()
        if isinstance(x, TransformerEngineBaseModule)
    }


def parts_with_scales(model: MegatronModule) -> dict[str, MegatronModule]:
    """Return the parts of a model that use delayed scaling, by name."""
    parts = {name: part for name, part in model.named_children() if isinstance(part, MegatronModule)}
    return {name: x for name, x in parts.items() if x.config.fp8 and x.config.fp8_recipe == "delayed"}


def with_plain_scales(model: MegatronModule, state: ShardedStateDict, *, is_loading: bool) -> ShardedStateDict:
    """Return a model's sharded state with scales as tensors and without any other extra state.

    Args:
        is_loading: request the scales of every module that may have some; modules that have not run yet have none.
    """
    modules = scaled_modules(model)
    plain = {}
    for name, value in state.items():
        module_name, _, last = name.rpartition(".")
        if last != EXTRA_STATE or not isinstance(value, ShardedObject):
            plain[name] = value
        elif module_name in modules:
            scales = modules[module_name].get_fp8_meta_tensors()
            value.data = scales and {key: [x.cpu() for x in tensors] for key, tensors in scales.items()}
            if scales is not None or is_loading:
                plain[name] = value
    return plain


def take_scales(model: MegatronModule, loaded: dict[str, Any]) -> dict[str, Any]:
    """Load scales into the modules and return the rest of the loaded state."""
    pickled = 0
    rest = {name: value for name, value in loaded.items() if not name.endswith(f".{EXTRA_STATE}")}
    for name, module in scaled_modules(model).items():
        scales = loaded.get(f"{name}.{EXTRA_STATE}")
        if isinstance(scales, Tensor):
            pickled += scales.numel() > 0
        elif scales is not None:
            # In the backward pass two tensors per product are scaled: those of the gradients.
            module.fp8_meta["num_gemms"] = len(scales["scaling_bwd"][0]) // 2
            module.init_fp8_meta_tensors(get_fp8_recipe(model.config))
            module.reset_fp8_meta_tensors(scales)
    if pickled:
        logger.warning("FP8: %d layers start with new scales, because the checkpoint holds theirs as pickles", pickled)
    return rest
