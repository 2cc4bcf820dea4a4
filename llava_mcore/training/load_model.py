"""The weights that a run starts with: those of a checkpoint, and adapters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llava_mcore.adapters.adaptation import AdapterSetup
from llava_mcore.adapters.attach import attach_adapters
from llava_mcore.adapters.factors import load_adapters, load_peft_folder
from llava_mcore.adapters.quantize_model import keep_experts_in_fp8, quantize_model
from llava_mcore.adapters.quantized import multiply_in_fp8
from llava_mcore.checkpoint.dist import load_weights
from llava_mcore.checkpoint.node_local import is_local, load_local_weights
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.parallel.groups import Groups
from llava_mcore.parallel.together import raise_together


def load_checkpoint(models: Sequence[VisionLanguageModel], checkpoint: Path, groups: Groups) -> None:
    """Fill every parameter from a checkpoint; a collective call."""

    def load() -> None:
        if is_local(checkpoint):
            load_local_weights(models, checkpoint, groups.rank)
        else:
            load_weights(models, checkpoint, groups.data_parallel)

    raise_together(groups, load)


def load_adapted(
    models: Sequence[VisionLanguageModel],
    adapter_setup: AdapterSetup,
    groups: Groups,
    *,
    quantize: str,
    multiplies_in_fp8: bool,
    seed: int,
) -> None:
    """Load the model that adapters belong to, add them, and load what they begin with; a collective call."""
    # The base first, because its weights may be quantized.
    load_checkpoint(models, adapter_setup.base.folder, groups)
    if quantize != "none" and multiplies_in_fp8:
        raise_together(groups, lambda: multiply_in_fp8(models, adapter_setup.layers))
        raise_together(groups, lambda: keep_experts_in_fp8(models, adapter_setup.layers))
    elif quantize != "none":
        raise_together(groups, lambda: quantize_model(models, adapter_setup.layers, quantize, groups))

    def attach() -> None:
        for model in models:
            attach_adapters(
                model,
                adapter_setup.plans,
                adapter_setup.layers,
                tp_size=groups.tp_size,
                tp_rank=groups.tp_rank,
                seed=seed,
            )
        for plan in adapter_setup.plans:
            if plan.name in adapter_setup.folders:
                load_peft_folder(models, adapter_setup.folders[plan.name], plan, adapter_setup.layers, groups)

    raise_together(groups, attach)
    # Adapters that a run has saved, if it starts from such a checkpoint.
    checkpoint = adapter_setup.checkpoint
    if checkpoint is not None:
        raise_together(groups, lambda: load_adapters(models, checkpoint, adapter_setup.own_names, groups.rank))
