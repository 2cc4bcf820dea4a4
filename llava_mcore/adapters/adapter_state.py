"""The state that a run with adapters saves and loads: adapters, and the model's own parameters that belong to them."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from collections.abc import Collection, Sequence
from pathlib import Path

from megatron.core.dist_checkpointing.mapping import ShardedStateDict

from llava_mcore.adapters.factors import is_adapter
from llava_mcore.checkpoint.dist import fill_model, load_state, model_state
from llava_mcore.checkpoint.fp8_scales import EXTRA_STATE
from llava_mcore.checkpoint.node_local import is_local, load_local
from llava_mcore.checkpoint.sharded import each_layer_apart
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.models.trainable import whole_name


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
