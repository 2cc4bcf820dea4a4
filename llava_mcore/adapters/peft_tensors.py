"""The tensors of a PEFT folder: their names and shapes for an adapter of this model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from llava_mcore.adapters.linear_layers import WEIGHT, ModelLayers
from llava_mcore.adapters.targets import LoraPlan, trained_parameters
from llava_mcore.errors import ConversionError
from llava_mcore.files.hf_folder import HfFolder

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
LORA_A, LORA_B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
BASE_LAYER = ".base_layer."
"""Between the name of an adapted layer and its own weight or bias."""
_PICKLED = "adapter_model.bin"


def open_weights(folder: Path) -> HfFolder:
    """Return the file with an adapter's tensors. ConversionError if there is none that can be read safely."""
    path = folder / WEIGHTS
    if not path.is_file():
        pickled = (folder / _PICKLED).is_file()
        remedy = f": {_PICKLED} is not read; load it with PEFT and write it again with save_pretrained"
        raise ConversionError(f"{folder}: no {WEIGHTS}{remedy if pickled else ''}")
    return HfFolder.of_file(path)


def names_in_folder(tensors: Iterable[str], layers: ModelLayers) -> dict[str, str]:
    """Map each tensor's name in today's transformers to its name in the folder.

    Tensors of layers that do not change the model's output are left out: PEFT adapts the tower's last layers too, whose
    features LLaVA does not use.
    """
    modules = aliases(layers) | layers.parameter_aliases
    found = {}
    for key in tensors:
        name = key.removeprefix(PREFIX).replace(BASE_LAYER, ".")
        end = next((end for end in (LORA_A, LORA_B, MAGNITUDE) if name.endswith(end)), "")
        module = name.removesuffix(end)
        if (module + WEIGHT if end else module) not in layers.unused:
            found[modules.get(module, module) + end] = key
    return found


def aliases(layers: ModelLayers) -> dict[str, str]:
    """Map every name that a linear layer has in files to its name in transformers' model."""
    members = layers.members
    named = {alias: name for name, member in members.items() for alias in member.aliases}
    return named | {name: name for name in members}


def expected_tensors(plan: LoraPlan, layers: ModelLayers) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that an adapter has, by its name in transformers' model."""
    trained, members = trained_parameters(plan, layers), layers.members
    found = {x.name: x.shape for x in layers.parameters if trained[x.megatron]}
    for name, rank in plan.ranks.items():
        inputs, outputs = members[name].inputs, members[name].outputs
        found |= {f"{name}{LORA_A}": (rank, inputs), f"{name}{LORA_B}": (outputs, rank)}
        if plan.dora:
            found[f"{name}{MAGNITUDE}"] = (outputs,)
    return found


def misfits(found: Mapping[str, tuple[int, ...]], plan: LoraPlan, layers: ModelLayers) -> list[str]:
    """Return every tensor that is missing, has another shape, or has no counterpart here.

    Args:
        found: shapes by names in transformers' model.
    """
    expected = expected_tensors(plan, layers)
    pairs = {name: (found[name], shape) for name, shape in expected.items() if name in found}
    return [
        *(f"{name} is missing" for name in expected if name not in found),
        *(f"{name} is {shape}, expected {wanted}" for name, (shape, wanted) in pairs.items() if shape != wanted),
        *(f"{name} has no counterpart here" for name in sorted(found.keys() - expected.keys())),
    ]
