"""Layer expansion (LLaMA Pro, arXiv 2401.02415; Control-LLM, arXiv 2501.10979): inserts decoder layers that begin as
the identity.

A new layer is a copy of the one before it, but the last matrices of its attention and of its MLP are zero. So it adds
nothing to the hidden states until it is trained. The folder is an ordinary one of its class; config.json lists the new
layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from llava_mcore.build.write_folder import Part
from llava_mcore.errors import ConfigError, ConversionError, problems
from llava_mcore.files.atomic import require_absent, written_beside
from llava_mcore.files.hf_files import CONFIG, copy_companions, read_config, write_index
from llava_mcore.files.hf_folder import HfFolder, plan_file, write_tensors
from llava_mcore.models.architectures.expanded import EXPANDED, expanded_layers
from llava_mcore.models.architectures.hf_config import load_hf_config, model_dims
from llava_mcore.models.model_table import detect_names, mapping_table
from llava_mcore.weights.names import HfNames

_LAST_MODULES = ("linear_proj", "out_proj", "linear_fc2")
"""Megatron's names of the modules that end attention, a delta net and an MLP."""


@dataclass(frozen=True)
class NewTensor:
    """A tensor of the new folder: a copy of another one, or zeros of its shape."""

    name: str
    source: str
    is_zero: bool


@dataclass(frozen=True)
class Expansion:
    """Where copies are inserted.

    origins: for each layer of the new model, the old layer that it is or copies. copies: which of them are copies.
    """

    origins: tuple[int, ...]
    copies: tuple[int, ...]

    @classmethod
    def after(cls, layers: Iterable[int], num_layers: int) -> Expansion:
        """Insert a copy after each of some layers."""
        chosen = set(layers)
        pairs = [(i, is_copy) for i in range(num_layers) for is_copy in ((False, True) if i in chosen else (False,))]
        return cls(tuple(i for i, _ in pairs), tuple(new for new, (_, is_copy) in enumerate(pairs) if is_copy))

    def now(self, layer: int) -> int:
        """Return the new number of an old layer."""
        return self.origins.index(layer)


def chosen_layers(text: str, num_layers: int, first: int, source: Path) -> list[int]:
    """Return the layers after which copies are inserted: `3,7,11`, or `every:4` for the last of every four.

    Args:
        first: copies may stand after this layer and later ones.

    Raises:
        ConfigError: not such a text, or there are no such layers.
    """
    where = f"--expand-layers {text}"
    every, _, step = text.partition(":")
    parts = [step] if every == "every" else text.split(",")
    if not all(part.isdecimal() for part in parts) or (every == "every" and int(step) < 1):
        raise ConfigError(f"{where}: expected numbers of layers, such as 3,7,11, or every:N for each N-th layer")
    layers = range(int(step) - 1, num_layers, int(step)) if every == "every" else [int(x) for x in parts]
    if len(set(layers)) != len(layers) or not layers or max(layers) >= num_layers:
        raise ConfigError(f"{where}: {source} has the layers 0 to {num_layers - 1}; name some of them, each once")
    if min(layers) < first:
        raise ConfigError(
            f"{where}: {source} adds features of its tower after the layers 0 to {first}, which therefore keep their "
            f"numbers: choose from {first} to {num_layers - 1}"
        )
    return list(layers)


def expand_folder(source: Path, save_dir: Path, text: str, say: Callable[[str], None]) -> list[Part]:
    """Write a copy of a folder whose language model has more layers, and return the parts of the model.

    Args:
        source: a Hugging Face folder of a supported class.
        text: see `chosen_layers`.

    Raises:
        ConfigError, ConversionError: it is not possible; nothing was written.
    """
    require_absent(save_dir, activity="a build")
    folder, hf = HfFolder.open(source), load_hf_config(source)
    num_layers, dims = int(hf.text_config.num_hidden_layers), model_dims(hf)
    first = max(0, dims.num_deepstack_layers - 1)
    expansion = Expansion.after(chosen_layers(text, num_layers, first, source), num_layers)
    names = detect_names(hf, folder.tensors, source=str(source))
    tensors = list(new_tensors(hf, names, folder, expansion))
    config = new_config(read_config(source), hf, expansion)
    say(f"decoder layers: {num_layers} -> {len(expansion.origins)}, new: {', '.join(map(str, expansion.copies))}")
    num_bytes = sum(folder.where(x.source).num_bytes for x in tensors)
    with written_beside(save_dir, num_bytes=num_bytes, activity="the build") as partial:
        _write_weights(folder, tensors, partial)
        copy_companions(source, partial, skip=[CONFIG])
        (partial / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        _check(partial, hf, expansion)
    return _summary(source, folder, tensors, names, expansion)


def new_tensors(hf: PretrainedConfig, names: HfNames, folder: HfFolder, expansion: Expansion) -> Iterator[NewTensor]:
    """Yield the tensors of the new folder, file by file in the order of the old one."""
    rows = hf.text_config.vocab_size  # only names are needed
    table = mapping_table(hf, names, hf_tensors=folder.tensors, padded_vocab_size=rows)
    ends = {
        name
        for megatron, entry in table.entries.items()
        if megatron.startswith("language_model.") and megatron.split(".")[-2] in _LAST_MODULES
        for name in entry.hf_names
    }
    prefix = f"{names.text}layers."
    for name in folder.tensors:
        index, _, rest = name.removeprefix(prefix).partition(".")
        if not name.startswith(prefix) or not index.isdecimal():
            yield NewTensor(name, name, False)
            continue
        for new, old in enumerate(expansion.origins):
            if old == int(index):
                yield NewTensor(f"{prefix}{new}.{rest}", name, new in expansion.copies and name in ends)


def new_config(values: Mapping[str, Any], hf: PretrainedConfig, expansion: Expansion) -> dict[str, Any]:
    """Return config.json for the new layers.

    Where the old one has a rule (every fourth layer, for example), the new one has a list with a value per layer.
    """
    config = deepcopy(dict(values))
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    old, origins = hf.text_config.to_dict(), expansion.origins
    num_layers = old["num_hidden_layers"]
    for key, value in old.items():
        if isinstance(value, list) and len(value) == num_layers and key != "mlp_only_layers":
            text[key] = [value[i] for i in origins]
    if "decoder_sparse_step" in old:  # counts layers, of which there are more now
        dense = {i for i in range(num_layers) if i in old["mlp_only_layers"] or (i + 1) % old["decoder_sparse_step"]}
        text["mlp_only_layers"] = [new for new, i in enumerate(origins) if i in dense]
        text["decoder_sparse_step"] = 1
    text["num_hidden_layers"] = len(origins)
    config[EXPANDED] = sorted({*expansion.copies, *(expansion.now(i) for i in expanded_layers(hf))})
    return config


def _write_weights(folder: HfFolder, tensors: Sequence[NewTensor], target: Path) -> None:
    """Write each tensor into the file that its source is in."""
    files: dict[str, str] = {}
    by_file: dict[str, list[NewTensor]] = {}
    for x in tensors:
        files[x.name] = folder.tensors[x.source].file
        by_file.setdefault(files[x.name], []).append(x)

    def content(chosen: Sequence[NewTensor]) -> Iterator[tuple[str, Tensor]]:
        for x in chosen:
            tensor = folder.get(x.source)
            yield x.name, torch.zeros_like(tensor) if x.is_zero else tensor

    size = 0
    for file, chosen in by_file.items():
        places = {x.name: folder.where(x.source) for x in chosen}
        plan = plan_file(target / file, {name: (at.dtype, at.shape) for name, at in places.items()})
        size += sum(at.num_bytes for at in places.values())
        write_tensors(plan, content(chosen))
    if len(by_file) > 1:
        write_index(target, files, size)


def _check(folder: Path, old: PretrainedConfig, expansion: Expansion) -> None:
    """Raise ConversionError unless transformers reads the config as it was meant, and the tensors fit it."""
    hf, tensors = load_hf_config(folder), HfFolder.open(folder).tensors
    before, after = old.text_config.to_dict(), hf.text_config.to_dict()
    wrong = [
        f"text_config.{key}: {after.get(key)}"
        for key, value in before.items()
        if isinstance(value, list) and len(value) == before["num_hidden_layers"] and key != "mlp_only_layers"
        if after.get(key) != [value[i] for i in expansion.origins]
    ]
    table = mapping_table(
        hf,
        detect_names(hf, tensors, source=str(folder)),
        hf_tensors=tensors,
        padded_vocab_size=hf.text_config.vocab_size,
    )
    known = table.hf_to_entry().keys() | table.unused.keys() | table.copies.keys()
    wrong += [f"tensor: {name}" for name in sorted(known ^ tensors.keys())]
    if wrong:
        raise ConversionError(problems("the layers cannot be inserted: their settings would be different", wrong))


def _summary(
    source: Path, folder: HfFolder, tensors: Sequence[NewTensor], names: HfNames, expansion: Expansion
) -> list[Part]:
    """Return a row for the new layers, and one for the rest."""

    def count(chosen: Iterable[NewTensor]) -> int:
        return sum(folder.where(x.source).num_bytes // folder.where(x.source).dtype.itemsize for x in chosen)

    prefixes = tuple(f"{names.text}layers.{i}." for i in expansion.copies)
    new = [x for x in tensors if x.name.startswith(prefixes)]
    old = [x for x in tensors if not x.name.startswith(prefixes)]
    shape = f"{len(expansion.copies)} layers: {', '.join(map(str, expansion.copies))}"
    return [Part("model", str(source), "unchanged", count(old)), Part("new layers", "copies", shape, count(new))]
