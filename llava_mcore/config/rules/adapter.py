"""Rules between an adapter's options and the rest of a run. See `rules`."""

from __future__ import annotations

from collections.abc import Iterator

from llava_mcore.config.schema import RunConfig
from llava_mcore.config.sections.adapter import RANK_KEYS, is_adapter_name

_INSTEAD = "with an adapter the model is frozen: omit it, or name what to train in full with --lora-modules-to-save"


def check_adapter(run: RunConfig) -> Iterator[str]:
    """Yield options that contradict an adapter. Names of layers are checked where the model is known."""
    adapter, model = run.adapter, run.model
    if not adapter.is_on:
        return
    if adapter.load is not None and adapter.ranks:
        *keys, last = RANK_KEYS.values()
        yield f"adapter.load takes the rank from its folder: omit {', '.join(keys)} and {last}"
    for folder in (adapter.load, *adapter.frozen):
        if folder is not None and not (folder / "adapter_config.json").is_file():
            yield f"{folder}: no adapter_config.json; expected a folder written by PEFT or export-hf"
    names = [adapter.name, *(folder.name for folder in adapter.frozen)]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"several adapters are called {name}: rename a folder of adapter.frozen, or change adapter.name"
    for folder in adapter.frozen:
        if not is_adapter_name(folder.name):
            yield f"{folder}: an adapter is named by its folder, with letters, digits, '-' and '_' only: rename it"
    for key, is_set in (
        ("model.freeze", bool(model.freeze)),
        ("model.unfreeze", bool(model.unfreeze)),
        ("--train-expanded", model.train_expanded),
        ("model.freeze_vision_model=false", not model.freeze_vision_model),
    ):
        if is_set:
            yield f"{key}: {_INSTEAD}"
    if run.training.fp8:
        yield from _quantized_in_fp8(run)
    if run.checkpoint.init:
        yield "--init makes a random model, and an adapter belongs to a trained one: give --megatron-load-dir instead"


def _quantized_in_fp8(run: RunConfig) -> Iterator[str]:
    """Yield what `--lora-quantize` does not allow beside `--fp8`."""
    training, kind = run.training, run.adapter.quantize
    if kind == "nf4":
        yield "--lora-quantize nf4 dequantizes matrices to half precision: omit --fp8, or use --lora-quantize fp8"
    if kind == "fp8" and training.fp8_recipe == "blockwise":
        yield "--lora-quantize fp8 has one scale per matrix, --fp8-recipe blockwise one per block: use another recipe"
    if kind == "fp8" and (training.fp8_first_layers_bf16 or training.fp8_last_layers_bf16):
        yield "--lora-quantize fp8 leaves no layer in bf16: omit training.fp8_first_layers_bf16 and …_last_…"


def dequantizes_matrices(run: RunConfig) -> bool:
    """Return whether the run uses layers that dequantize their matrices before each product."""
    return run.adapter.quantize != "none" and not run.training.fp8


def trains_tower(run: RunConfig) -> bool:
    """Return whether any of the vision tower may be trained, so that options for a trained tower have an effect."""
    adapter, model = run.adapter, run.model
    if adapter.is_on:
        return bool(adapter.vision_r or adapter.load or adapter.modules_to_save or adapter.bias == "all")
    return not model.freeze_vision_model or bool(model.unfreeze)


def trains_projection(run: RunConfig) -> bool:
    """The same for the projection."""
    adapter, model = run.adapter, run.model
    if adapter.is_on:
        return bool(adapter.projection_r or adapter.load or adapter.modules_to_save or adapter.bias == "all")
    return (not model.freeze_vision_projection and not model.train_expanded) or bool(model.unfreeze)
