"""Lists the tensors of a Hugging Face folder or a Megatron checkpoint, one line per shape."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PretrainedConfig

from llava_mcore.adapters.adapter_record import holds_adapters, read_base
from llava_mcore.checkpoint import layout
from llava_mcore.checkpoint.torch_dist_metadata import StoredTensors
from llava_mcore.config.load import load_run_config
from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import CheckpointError, ConversionError
from llava_mcore.files.hf_folder import DTYPES, HfFolder
from llava_mcore.files.regular import read_object
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.architectures.registry import architecture_of, ties_embeddings, tower_config
from llava_mcore.models.language.families.registry import embedding_rows, language_family
from llava_mcore.models.model_table import detect_names, mapping_table
from llava_mcore.models.tied_weights import settle_ties
from llava_mcore.models.vision.families.registry import vision_family
from llava_mcore.weights.names import HfNames
from llava_mcore.weights.table import MappingTable

VISION, PROJECTION, LANGUAGE, OTHER = "vision tower", "projection", "language model", "optimizer and others"
_MEGATRON_PARTS = {"vision_model.": VISION, "vision_projection.": PROJECTION, "language_model.": LANGUAGE}


@dataclass(frozen=True)
class InventoryRow:
    """`count` tensors that differ only in their layer number.

    `state`: trainable, frozen, unused, copy, or empty for other tensors. `ignored`: why training does not use
    it; empty if it does.
    """

    name: str
    part: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    state: str
    ignored: str = ""
    itemsize: int = 1

    @property
    def parameters(self) -> int:
        return self.count * math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.parameters * self.itemsize


@dataclass(frozen=True)
class Inventory:
    """`facts`: lines about the whole."""

    facts: list[str]
    rows: list[InventoryRow]


@dataclass(frozen=True)
class _Tensor:
    name: str
    part: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    state: str
    ignored: str = ""


def of_folder(folder: Path) -> Inventory:
    """Read the headers of a Hugging Face folder, a folder of checkpoints (its newest one) or one iteration's folder.

    Raises:
        ConversionError, CheckpointError: it is none of these, or not readable.
    """
    if (folder / layout.TRACKER).is_file():
        return of_megatron(*layout.latest_checkpoint(folder))
    if layout.is_iteration(folder):
        return of_megatron(folder, None)
    if (folder / "config.json").is_file():
        return of_hf(folder)
    raise ConversionError(
        f"{folder}: neither a Hugging Face folder (config.json) nor one of Megatron checkpoints ({layout.TRACKER})"
    )


def of_hf(folder: Path) -> Inventory:
    """Read the headers of a Hugging Face folder.

    Raises:
        ConversionError: the class or a family is unknown, or the weights are unreadable.
    """
    hf = load_hf_config(folder)
    weights = HfFolder.open(folder)
    settle_ties(hf, weights)
    names = detect_names(hf, weights.tensors, source=str(folder))
    table = mapping_table(hf, names, hf_tensors=weights.tensors, padded_vocab_size=embedding_rows(hf))
    files = {x.file for x in weights.tensors.values()}
    kind = architecture_of(hf).model_class.__name__
    facts = [f"{folder}: {kind} in {len(files)} weight file(s)", *_model_facts(hf)]
    tensors = [
        _hf_tensor(name, info.shape, DTYPES[info.dtype], names, table) for name, info in sorted(weights.tensors.items())
    ]
    return Inventory(facts, _with_tower(_rows(tensors), hf))


def _hf_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype, names: HfNames, table: MappingTable) -> _Tensor:
    is_projection = name.startswith(names.projection) or name == names.newline
    part = VISION if name.startswith(names.vision) else PROJECTION if is_projection else LANGUAGE
    if name in table.unused:
        return _Tensor(name, part, shape, dtype, "unused", table.unused[name])
    if name in table.copies:
        return _Tensor(name, part, shape, dtype, "copy", f"the same as {table.copies[name]}")
    if name not in table.hf_to_entry():
        return _Tensor(name, part, shape, dtype, "unknown", "no such tensor in this model: an import refuses it")
    return _Tensor(name, part, shape, dtype, "trainable")


def of_megatron(checkpoint: Path, iteration: int | None) -> Inventory:
    """Read the metadata of one iteration of a Megatron checkpoint. `iteration`: from the tracker.

    Raises:
        CheckpointError: it is not readable.
    """
    stored = StoredTensors.open(checkpoint)
    run_file = checkpoint / layout.RUN_FILE
    run = load_run_config(run_file, [], {}) if run_file.is_file() else None
    companions = layout.hf_folder(checkpoint)
    label = checkpoint.name if iteration is None else f"iteration {iteration}"
    facts = [f"{checkpoint}: a Megatron checkpoint, {label}"]
    hf = load_hf_config(companions) if (companions / "config.json").is_file() else None
    facts += [] if hf is None else _model_facts(hf)
    facts += _origin(checkpoint, run)
    frozen = _frozen(run)
    tensors = [_stored_tensor(stored, key, frozen) for key in sorted(stored)]
    return Inventory(facts, _with_tower(_rows(tensors) + _carried(companions), hf))


def _with_tower(rows: list[InventoryRow], hf: PretrainedConfig | None) -> list[InventoryRow]:
    """Return the rows with the tower named after what it perceives."""
    part = VISION if hf is None else vision_family(tower_config(hf)).name_in_messages
    return [replace(row, part=part) if row.part == VISION else row for row in rows]


def _stored_tensor(stored: StoredTensors, key: str, frozen: Mapping[str, bool]) -> _Tensor:
    part = next((part for prefix, part in _MEGATRON_PARTS.items() if key.startswith(prefix)), OTHER)
    state = "" if part == OTHER else "frozen" if frozen[part] else "trainable"
    return _Tensor(key, part, stored.shape(key), stored.dtype(key), state)


def _frozen(run: RunConfig | None) -> dict[str, bool]:
    """Return the parts that the run which wrote the checkpoint did not train; empty without a run."""
    if run is None or run.adapter.is_on:  # beside an adapter, only what is trained is saved
        return dict.fromkeys(_MEGATRON_PARTS.values(), False)
    model = run.model
    return {
        VISION: model.freeze_vision_model,
        PROJECTION: model.freeze_vision_projection,
        LANGUAGE: model.freeze_language_model,
    }


def _carried(companions: Path) -> list[InventoryRow]:
    """Return the tensors that are stored for an export."""
    path = companions / layout.UNUSED
    if not path.is_file():
        return []
    reasons: Mapping[str, str] = read_object(companions / layout.RECORD, CheckpointError).get("unused", {})
    weights = HfFolder.of_file(path)
    return _rows(
        _Tensor(name, VISION, info.shape, DTYPES[info.dtype], "unused", reasons.get(name, ""))
        for name, info in sorted(weights.tensors.items())
    )


def _origin(checkpoint: Path, run: RunConfig | None) -> list[str]:
    """Return lines about what wrote the checkpoint, and with which layout."""
    facts = []
    manifest = layout.read_manifest(layout.hf_folder(checkpoint))
    if run is not None:
        sizes = run.parallel.tensor_model_parallel_size, run.parallel.pipeline_model_parallel_size
        kind = "with optimizer state" if run.checkpoint.save_optim else "weights only"
        facts.append(f"written by run {run.name} (stage {run.stage}) at tp {sizes[0]} x pp {sizes[1]}, {kind}")
        if holds_adapters(checkpoint):
            base = read_base(checkpoint)
            facts.append(f"adapters only; the model's own weights are in {base.folder} ({base.identity})")
        if run.model.freeze or run.model.unfreeze:
            facts.append(f"frozen by name, which the states below do not show: {run.model.frozen_parts()}")
    if manifest is not None:
        cast = "" if manifest.dtype is None else f", cast to {manifest.dtype}"
        facts.append(f"imported from {manifest.source} for tp {manifest.tp} x pp {manifest.pp}{cast}")
    return facts


def _model_facts(hf: PretrainedConfig) -> list[str]:
    text, vision = hf.text_config, tower_config(hf)
    tied = ", tied embeddings" if ties_embeddings(hf) else ""
    heads = f"{text.num_attention_heads} heads, {text.num_key_value_heads} key/value heads"
    tower = vision_family(vision)
    layers = " and ".join(map(str, architecture_of(hf).features(hf).layers))
    return [
        f"language model: {text.model_type}, {text.num_hidden_layers} layers of {text.hidden_size}, {heads}, "
        f"vocabulary {text.vocab_size:,}{tied}",
        *_expert_facts(text),
        f"{tower.name_in_messages}: {vision.model_type}, {tower.num_layers(vision)} layers of "
        f"{tower.hidden_size(vision)}, {tower.describe(vision)}, features of layer {layers}",
    ]


def _expert_facts(text: PretrainedConfig) -> list[str]:
    """Return a line about the experts of a language model; none without any."""
    family = language_family(text)
    dims = family.expert_dims(text)
    if not dims:
        return []
    fields = family.config_from_hf(text)
    used, num_sparse = family.layer_weights(text), sum(fields["moe_layer_freq"])
    return [
        f"experts: {dims['num_experts']} of width {dims['expert_ffn_hidden_size']} in {num_sparse} of "
        f"{text.num_hidden_layers} layers, {fields['moe_router_topk']} of them for each token, which uses {used:,} of "
        f"the layers' {used + family.inactive_weights(text):,} weights"
    ]


def _rows(tensors: Iterable[_Tensor]) -> list[InventoryRow]:
    """Put tensors that differ only in the numbers of layer and expert on one line: layers.{0-31}.mlp…"""
    groups: dict[tuple[object, ...], list[_Tensor]] = {}
    for x in tensors:
        groups.setdefault((_pattern(x.name), x.part, x.shape, x.dtype, x.state, x.ignored), []).append(x)
    return [_row(str(key[0]), members) for key, members in groups.items()]


def _pattern(name: str) -> str:
    """Return a name with {} in place of the first number, which is the layer's, and of an expert's."""
    return re.sub(r"\.experts\.\d+\.", ".experts.{}.", re.sub(r"\.\d+\.", ".{}.", name, count=1))


def _row(pattern: str, members: list[_Tensor]) -> InventoryRow:
    first = members[0]
    name = first.name
    if len(members) > 1:
        columns = zip(*(_indices(pattern, x.name) for x in members), strict=True)
        ranges = [_ranges(set(column)) for column in columns]
        name = pattern.format(*(x if x.isdigit() else f"{{{x}}}" for x in ranges))
    dtype = str(first.dtype).removeprefix("torch.")
    return InventoryRow(
        name, first.part, first.shape, dtype, len(members), first.state, first.ignored, itemsize=first.dtype.itemsize
    )


def _indices(pattern: str, name: str) -> list[int]:
    """Return the numbers that a pattern has taken out of a name."""
    match = re.fullmatch(re.escape(pattern).replace(r"\{\}", r"(\d+)"), name)
    assert match is not None
    return [int(x) for x in match.groups()]


def _ranges(layers: Iterable[int]) -> str:
    """Return 0-3,7 for 0, 1, 2, 3, 7."""
    runs = itertools.groupby(enumerate(sorted(layers)), key=lambda x: x[1] - x[0])
    ends = [(x[0][1], x[-1][1]) for x in (list(run) for _, run in runs)]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ends)
