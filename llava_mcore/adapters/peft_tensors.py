"""The tensors of a PEFT folder: their names and shapes for an adapter of this model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from llava_mcore.adapters.linear_layers import WEIGHT, ModelLayers
from llava_mcore.adapters.targets import LoraSettings, trained_parameters
from llava_mcore.errors import ConversionError
from llava_mcore.files.hf_folder import HfFolder, TensorInfo

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
LORA_A, LORA_B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
BASE_LAYER = ".base_layer."
"""Between the name of an adapted layer and its own weight or bias."""
_WRAPPED = {".experts.base_layer": ".experts.gate_up_proj", ".experts": ".experts.down_proj"}
"""Where PEFT has the adapters of the two tensors of experts: it wraps their module once for each, in this order."""
_PICKLED = "adapter_model.bin"


def open_weights(folder: Path) -> HfFolder:
    """Return the file with an adapter's tensors. ConversionError if there is none that can be read safely."""
    path = folder / WEIGHTS
    if not path.is_file():
        pickled = (folder / _PICKLED).is_file()
        remedy = f": {_PICKLED} is not read; load it with PEFT and write it again with save_pretrained"
        raise ConversionError(f"{folder}: no {WEIGHTS}{remedy if pickled else ''}")
    return HfFolder.of_file(path)


def names_in_folder(tensors: Mapping[str, TensorInfo], layers: ModelLayers) -> dict[str, str]:
    """Map each tensor's name in today's transformers to its name in the folder.

    An adapter of a part alone, such as the text model, has names without the part's prefix.

    Tensors of layers that do not change the model's output are left out: PEFT adapts the tower's last layers too, whose
    features LLaVA does not use.
    """
    modules = aliases(layers) | layers.parameter_aliases
    names = {key: without_wrappers(key) for key in tensors}
    inner, full_prefix = _prefixes(names, tensors, layers)
    names_by_model_name = {}
    for key, short in names.items():
        # The output layer of a text model is beside the module whose prefix is replaced, as in the whole model.
        name = full_prefix + short.removeprefix(inner) if short.startswith(inner) else short
        end = next((end for end in (LORA_A, LORA_B, MAGNITUDE) if name.endswith(end)), "")
        module = name.removesuffix(end)
        if (module + WEIGHT if end else module) not in layers.unused:
            names_by_model_name[modules.get(module, module) + end] = key
    return names_by_model_name


def without_wrappers(key: str) -> str:
    """Return a tensor's name as if PEFT wrapped no modules."""
    name = key.removeprefix(PREFIX)
    for end in (LORA_A, LORA_B):
        for wrapped, tensor in _WRAPPED.items():
            if name.endswith(wrapped + end):
                return name.removesuffix(wrapped + end) + tensor + end
    return name.replace(BASE_LAYER, ".")


def factor_name(name: str, end: str) -> str:
    """Return the name in a folder of one factor of an adapter. `name`: of the layer, or of the tensor of experts."""
    for wrapped, tensor in _WRAPPED.items():
        if name.endswith(tensor):
            return PREFIX + name.removesuffix(tensor) + wrapped + end
    return PREFIX + name + end


def _prefixes(names: Mapping[str, str], tensors: Mapping[str, TensorInfo], layers: ModelLayers) -> tuple[str, str]:
    """Return which beginning of the adapter's names to replace, and by what: nothing, unless it is of a part alone.

    Args:
        names: of `tensors`, without PEFT's prefix.
    """
    known, members = aliases(layers), layers.adaptable
    shapes = {name.removesuffix(LORA_A): tensors[key].shape for key, name in names.items() if name.endswith(LORA_A)}
    if not shapes or all(name in known or name + WEIGHT in layers.unused for name in shapes):
        return "", ""
    parts = {name.removesuffix(x.key) for name, x in members.items() if name.endswith(x.key)}
    pairs = [("", "model."), *((inner, part) for part in sorted(parts) for inner in ("", "model."))]
    fitting = []
    for inner, part in pairs:
        named = {part + name.removeprefix(inner): shape for name, shape in shapes.items() if name.startswith(inner)}
        used = {name: shape for name, shape in named.items() if name in members}
        is_complete = all(name in members or name + WEIGHT in layers.unused for name in named)
        if used and is_complete and len(named) == len(shapes):
            fits = all(shape[1:] == (members[name].inputs,) for name, shape in used.items())
            fitting.append((not fits, inner, part))
    # One part fits, or one has these names and its misfits are listed.
    best = [pair for pair in fitting if pair[0] == min(fitting)[0]] if fitting else []
    return (best[0][1], best[0][2]) if len(best) == 1 else ("", "")


def aliases(layers: ModelLayers) -> dict[str, str]:
    """Map every name that a linear layer has in files to its name in transformers' model."""
    members = layers.adaptable
    named = {alias: name for name, member in members.items() for alias in member.aliases}
    return named | {name: name for name in members}


def expected_tensors(plan: LoraSettings, layers: ModelLayers) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that an adapter has, by its name in transformers' model."""
    trained, members = trained_parameters(plan, layers), layers.adaptable
    shapes = {x.name: x.shape for x in layers.parameters if trained[x.megatron]}
    for name in plan.lora_ranks:
        shapes[f"{name}{LORA_A}"], shapes[f"{name}{LORA_B}"] = plan.factor_shapes(members[name])
        if plan.dora:
            shapes[f"{name}{MAGNITUDE}"] = (members[name].outputs,)
    return shapes


def misfits(shapes: Mapping[str, tuple[int, ...]], plan: LoraSettings, layers: ModelLayers) -> list[str]:
    """Return every tensor that is missing, has another shape, or has no counterpart here.

    Args:
        shapes: shapes by names in transformers' model.
    """
    expected = expected_tensors(plan, layers)
    pairs = {name: (shapes[name], shape) for name, shape in expected.items() if name in shapes}
    return [
        *(f"{name} is missing" for name in expected if name not in shapes),
        *(
            f"{name} is {shape}, expected {expected_shape}"
            for name, (shape, expected_shape) in pairs.items()
            if shape != expected_shape
        ),
        *(
            f"{name} has no counterpart here: merge the adapter with PEFT (merge_and_unload) and import the model"
            for name in sorted(shapes.keys() - expected.keys())
        ),
    ]
