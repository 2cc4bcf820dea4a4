"""The linear layers of a model, on both sides: what may get an adapter, and under which names.

Adapters belong to Hugging Face's layers (q_proj), of which megatron-core's hold several (linear_qkv).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig

from llava_mcore.compat.transformers import model_without_weights
from llava_mcore.models.architectures.registry import architecture_of, ties_embeddings
from llava_mcore.models.language.families.registry import embedding_rows
from llava_mcore.models.model_table import detect_names, mapping_table, usual_names
from llava_mcore.weights.layouts import (
    Concat,
    ConcatRows,
    Copy,
    FuseGatedQKV,
    FuseQKV,
    PadColumns,
    PadParts,
    Regroup,
    TensorTransform,
)
from llava_mcore.weights.names import HasShape, HfNames
from llava_mcore.weights.table import Entry

WEIGHT, BIAS = ".weight", ".bias"
_OF_LINEARS = (Copy, Concat, ConcatRows, PadParts, PadColumns, FuseQKV, FuseGatedQKV, Regroup)
"""Layouts of linear layers' matrices."""


@dataclass(frozen=True)
class HfLinear:
    """One of Hugging Face's linear layers.

    `name`: in transformers' model. `part`: of our model, such as language_model. `key`: within the part, as the class's
    usual files have it; checkpoints use it, whatever transformers calls it. `aliases`: its names in files. `experts`:
    of a tensor of experts, which has a matrix for each, their number; a token meets `chosen` of them.
    """

    name: str
    part: str
    key: str
    aliases: tuple[str, ...]
    inputs: int
    outputs: int
    experts: int = 0
    chosen: int = 1

    @property
    def width(self) -> int:
        """Return inputs plus outputs, of all matrices that a token meets."""
        return (self.inputs + self.outputs) * self.chosen


@dataclass(frozen=True)
class MegatronLinear:
    """One of megatron-core's linear layers: `members` are those of Hugging Face that it holds, `name` is its own in the
    whole model."""

    name: str
    entry: Entry
    members: tuple[HfLinear, ...]

    @property
    def is_row_parallel(self) -> bool:
        """Whether ranks hold different inputs, not different outputs."""
        return self.entry.shard.dim == 1

    def blocks(self, tp_size: int) -> tuple[TensorTransform, tuple[int, ...]]:
        """Return the blocks that make up one rank's rows, which ranks divide evenly, and each block's member."""
        layout = self.entry.layout
        if isinstance(layout, FuseQKV | Regroup):
            heads = FuseQKV(layout.heads // tp_size, layout.groups // tp_size)
            return heads, (0, 1, 2) if isinstance(layout, FuseQKV) else (0, 0, 0)
        if isinstance(layout, FuseGatedQKV):
            return FuseGatedQKV(layout.heads // tp_size, layout.groups // tp_size), (0, 1, 2)
        if isinstance(layout, ConcatRows):
            return self._sections(layout, tp_size)
        if isinstance(layout, Concat | PadParts):
            return Concat(layout.num_parts), tuple(range(layout.num_parts))
        if self.entry.shard.blocks > 1:
            return Concat(self.entry.shard.blocks), (0,) * self.entry.shard.blocks
        return Copy(), (0,)

    def _sections(self, layout: ConcatRows, tp_size: int) -> tuple[TensorTransform, tuple[int, ...]]:
        """Return the blocks of a layer whose members consist of whole sections."""
        sections = self.entry.shard.sections
        ends = list(itertools.accumulate(layout.rows))
        members = tuple(bisect.bisect_left(ends, end) for end in itertools.accumulate(sections))
        return ConcatRows(tuple(x // tp_size for x in sections)), members


@dataclass(frozen=True)
class HfParameter:
    """A parameter of transformers' model and the Megatron parameter that holds it. `aliases`: its names in files."""

    name: str
    megatron: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ModelLayers:
    """The facts about a model that adapters need.

    `expert_tensors`: matrices of all experts of a layer. `entries`: of the mapping table, under transformers' names.
    `module_names`: all of transformers' model. `unused`: its parameters that do not change its output,
    such as those of tower layers after the feature layer, by all their names. `is_tied`: embedding and output layer are
    one.
    """

    linears: tuple[MegatronLinear, ...]
    parameters: tuple[HfParameter, ...]
    entries: Mapping[str, Entry]
    module_names: frozenset[str]
    unused: frozenset[str]
    is_tied: bool
    expert_tensors: tuple[MegatronLinear, ...] = ()

    @property
    def parameter_aliases(self) -> dict[str, str]:
        """Map every name that a parameter has in files to its name in transformers' model."""
        return {alias: x.name for x in self.parameters for alias in x.aliases} | {
            x.name: x.name for x in self.parameters
        }

    @property
    def members(self) -> dict[str, HfLinear]:
        """Return Hugging Face's linear layers by name."""
        return {member.name: member for linear in self.linears for member in linear.members}

    @property
    def expert_members(self) -> dict[str, HfLinear]:
        """Return the tensors of experts by name."""
        return {member.name: member for tensor in self.expert_tensors for member in tensor.members}

    @property
    def adaptable(self) -> dict[str, HfLinear]:
        """Return all that can have an adapter, by name."""
        return self.members | self.expert_members


def model_layers(hf: PretrainedConfig) -> ModelLayers:
    """Return the layers of a model. transformers' own is built without memory, for its names."""
    # transformers' model has the names that PEFT sees, the table those in files; adapters may use any style.
    architecture = architecture_of(hf)
    model = model_without_weights(architecture.model_class, hf)
    state = model.state_dict()
    names = detect_names(hf, state, source=architecture.model_class.__name__)
    here, usual = _entries(hf, names, state, names), _entries(hf, names, state, usual_names(hf))
    styles = [_entries(hf, names, state, style) for style in architecture.names.styles]
    modules = {name: module for name, module in model.named_modules() if name}
    sizes = {name: (x.in_features, x.out_features) for name, x in modules.items() if isinstance(x, nn.Linear)}
    # Every matrix of the table that is made of whole nn.Linear modules can be adapted.
    linears = []
    for name, entry in here.items():
        if not _may_be_linear(entry):
            continue
        hf_modules = [x.removesuffix(WEIGHT) for x in entry.hf_names]
        if not sizes.keys() >= set(hf_modules):
            continue  # a convolution, or a layer that transformers' model splits differently than its files
        linear = name.removesuffix(WEIGHT)
        part = linear.partition(".")[0]
        members = tuple(
            HfLinear(
                hf_name,
                part,
                _inside(usual[name].hf_names[i].removesuffix(WEIGHT), usual_names(hf)),
                tuple(dict.fromkeys(style[name].hf_names[i].removesuffix(WEIGHT) for style in (usual, *styles))),
                *sizes[hf_name],
            )
            for i, hf_name in enumerate(hf_modules)
        )
        linears.append(MegatronLinear(linear, entry, members))
    # All parameters, for those that are trained in full.
    parameters = tuple(
        HfParameter(
            x,
            name,
            tuple(style[name].hf_names[i] for style in (usual, *styles) if name in style),
            tuple(state[x].shape),
        )
        for name, entry in here.items()
        for i, x in enumerate(entry.hf_names)
    )
    unused = _unused(hf, names, state)
    experts = tuple(
        _expert_tensor(hf, entry, usual[name], state) for name, entry in here.items() if entry.shard.experts
    )
    return ModelLayers(tuple(linears), parameters, here, frozenset(modules), unused, ties_embeddings(hf), experts)


def _expert_tensor(hf: PretrainedConfig, entry: Entry, usual: Entry, state: Mapping[str, HasShape]) -> MegatronLinear:
    """Return a tensor of experts, which transformers' model holds fused. `usual`: the entry under the usual names."""
    ((name,), (usual_name,)) = entry.hf_names, usual.hf_names
    num_experts, outputs, inputs = state[name].shape
    megatron = entry.megatron.removesuffix(WEIGHT)
    part, key = megatron.partition(".")[0], _inside(usual_name, usual_names(hf))
    chosen = hf.text_config.num_experts_per_tok
    member = HfLinear(name, part, key, (name, usual_name), inputs, outputs, num_experts, chosen)
    return MegatronLinear(megatron, entry, (member,))


def _unused(hf: PretrainedConfig, names: HfNames, state: Mapping[str, HasShape]) -> frozenset[str]:
    """Return the tensors of transformers' model that ours has no use for, by all their names."""
    table = mapping_table(hf, names, hf_tensors=state, padded_vocab_size=embedding_rows(hf))
    styles = (names, usual_names(hf), *architecture_of(hf).names.styles)
    ends = [name.removeprefix(names.vision) for name in table.unused if name.startswith(names.vision)]
    return frozenset(table.unused) | {style.vision + end for style in styles for end in ends}


def _entries(hf: PretrainedConfig, here: HfNames, state: Mapping[str, HasShape], style: HfNames) -> dict[str, Entry]:
    """Return the entries under the names of a style. `state`: all tensors of transformers' model, under `here`."""
    renamed = {style.text + x.removeprefix(here.text): state[x] for x in state if x.startswith(here.text)}
    table = mapping_table(hf, style, hf_tensors=renamed, padded_vocab_size=embedding_rows(hf))
    return dict(table.entries)


def _may_be_linear(entry: Entry) -> bool:
    """Return whether an entry is the weight of a divided linear layer, other than the output layer."""
    is_matrix = entry.megatron.endswith(WEIGHT) and entry.shard.dim is not None
    return is_matrix and isinstance(entry.layout, _OF_LINEARS)


def _inside(name: str, names: HfNames) -> str:
    """Return a layer's name without its part's prefix."""
    prefixes = (names.vision, names.projection, names.text)
    return name.removeprefix(next(prefix for prefix in prefixes if name.startswith(prefix)))
