"""The mapping table: one `Entry` per Megatron tensor, with the Hugging Face tensors that it consists of.

Import, export, every tensor-parallel size and the completeness check all read the same table.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from llava_mcore.compat.torch import is_view_of
from llava_mcore.errors import ConversionError, problems
from llava_mcore.weights.layouts import Copy, TensorTransform
from llava_mcore.weights.slices import Shape, TensorSlice

_DESCRIBED = 4  # tensors of an entry that a message names


@dataclass(frozen=True)
class Shard:
    """Split along `dim` (None: every rank holds the whole tensor).

    With `blocks` > 1 each of the equal blocks along `dim` is split separately and every rank gets its part
    of each: SwiGLU's [gate; up] becomes [gate_r; up_r] on rank r. `sections`: sizes of blocks that differ. `experts`:
    dim 0 counts experts, which expert-parallel ranks divide, and `dim` is split over expert-tensor-parallel ranks.
    """

    dim: int | None
    blocks: int = 1
    sections: tuple[int, ...] = ()
    experts: bool = False

    def split(self, full: Tensor, tp_size: int) -> list[Tensor]:
        """Return the slice of every tensor-parallel rank, in rank order.

        Raises:
            ConversionError: the size is not divisible.
        """
        if self.dim is None or tp_size == 1:
            return [full] * tp_size
        size = full.shape[self.dim]
        if self.sections:
            if any(x % tp_size for x in self.sections):
                raise ConversionError(
                    f"a tensor of shape {tuple(full.shape)} cannot be split along dim {self.dim} for tp {tp_size}: its "
                    f"parts are {', '.join(map(str, self.sections))}"
                )
            cut = [block.chunk(tp_size, self.dim) for block in full.split(self.sections, self.dim)]
            return [torch.cat(parts, self.dim) for parts in zip(*cut, strict=True)]
        if size % (tp_size * self.blocks):
            raise ConversionError(
                f"a tensor of shape {tuple(full.shape)} cannot be split along dim {self.dim} into "
                f"{self.blocks} block(s) x tp {tp_size}: {size} is not a multiple of {tp_size * self.blocks}"
            )
        cut = [block.chunk(tp_size, self.dim) for block in full.chunk(self.blocks, self.dim)]
        return [torch.cat(parts, self.dim) for parts in zip(*cut, strict=True)]

    def split_experts(self, full: Tensor, ep_size: int, etp_size: int) -> list[list[Tensor]]:
        """Return the slice of every rank: a list for each expert-parallel rank, of its expert-tensor-parallel ranks.

        Raises:
            ConversionError: a size is not divisible.
        """
        if full.shape[0] % ep_size:
            raise ConversionError(f"{full.shape[0]} experts cannot be divided over ep {ep_size}")
        return [self.split(part, etp_size) for part in full.chunk(ep_size)]

    def join(self, slices: Sequence[Tensor]) -> Tensor:
        """Inverse of `split`: the slices of every rank, in rank order, back to the full tensor."""
        if self.dim is None:
            return slices[0]
        if self.sections:
            sizes = [x // len(slices) for x in self.sections]
            by_block = zip(*(x.split(sizes, self.dim) for x in slices), strict=True)
        else:
            by_block = zip(*(x.chunk(self.blocks, self.dim) for x in slices), strict=True)
        return torch.cat([torch.cat(parts, self.dim) for parts in by_block], self.dim)


REPLICATED = Shard(None)
COLUMN = Shard(0)
ROW = Shard(1)
GATED_COLUMN = Shard(0, blocks=2)
EXPERT_COLUMN = Shard(1, blocks=2, experts=True)
EXPERT_ROW = Shard(2, experts=True)


@dataclass(frozen=True)
class Entry:
    """One Megatron tensor.

    `megatron` and `hf` may have placeholders ({layer}, {wb}) until `expand` fills them; names are always
    spelled out, never matched by a pattern.
    """

    megatron: str
    hf: tuple[str, ...] | str
    shard: Shard
    layout: TensorTransform = field(default_factory=Copy)

    @property
    def hf_names(self) -> tuple[str, ...]:
        return (self.hf,) if isinstance(self.hf, str) else self.hf

    def expand(self, **values: Iterable[object]) -> Iterator[Entry]:
        """Yield one concrete entry for each combination of the placeholders that this entry uses."""
        used = [key for key in values if f"{{{key}}}" in self.megatron]
        for combination in itertools.product(*(values[key] for key in used)):
            filled = dict(zip(used, combination, strict=True))
            hf = tuple(name.format(**filled) for name in self.hf_names)
            yield replace(self, megatron=self.megatron.format(**filled), hf=hf)

    def to_megatron(self, hf: Mapping[str, Tensor]) -> Tensor:
        """Return the full Megatron tensor."""
        return self.layout.to_megatron(*(hf[name] for name in self.hf_names))

    def to_hf(self, megatron: Tensor) -> dict[str, Tensor]:
        """Return the Hugging Face tensors of one full Megatron tensor."""
        return dict(zip(self.hf_names, self.layout.to_hf(megatron), strict=True))

    def hf_slices(self, megatron_shape: Shape) -> tuple[TensorSlice, ...] | None:
        """Return each Hugging Face tensor's slice of the full Megatron tensor, in the order of `hf_names`.

        None if the layout does more than concatenate rows, or stack such matrices: then the whole tensor is needed at
        once. A slice has the dims of the Megatron tensor, also where the Hugging Face tensor is one matrix of many.
        """
        full = torch.empty(megatron_shape, device="meta")
        slices = [_rows_of(part, full) for part in self.layout.to_hf(full)]
        return None if None in slices else tuple(x for x in slices if x is not None)

    def hf_shapes(self, megatron_shape: Shape) -> tuple[Shape, ...]:
        """Return the shape of each Hugging Face tensor, in the order of `hf_names`."""
        return tuple(tuple(x.shape) for x in self.layout.to_hf(torch.empty(megatron_shape, device="meta")))


def _rows_of(part: Tensor, full: Tensor) -> TensorSlice | None:
    """Return the place of whole rows of a tensor, or of one of the matrices in it; None if a part is something else."""
    lead = full.ndim - part.ndim
    inner = full.shape[lead + 1 :]
    if not is_view_of(part, full) or part.shape[1:] != inner or part.stride() != full.stride()[lead:]:
        return None
    start, offset = list[int](), part.storage_offset()
    for stride in full.stride()[: lead + 1]:
        start.append(offset // stride)
        offset %= stride
    return TensorSlice((*start, *(0 for _ in inner)), (*(1 for _ in range(lead)), *part.shape))


@dataclass(frozen=True)
class MappingTable:
    """All entries of one model.

    `unused` names Hugging Face tensors that training does not use, with the reason; they are stored
    and written back by an export. `copies` names Hugging Face tensors that repeat another one (a tied lm_head on disk).
    """

    entries: Mapping[str, Entry]
    unused: Mapping[str, str]
    copies: Mapping[str, str]

    @classmethod
    def of(
        cls,
        entries: Iterable[Entry],
        *,
        unused: Mapping[str, str] | None = None,
        copies: Mapping[str, str] | None = None,
    ) -> MappingTable:
        """Build a table.

        Raises:
            ConversionError: a Megatron or a Hugging Face tensor is named more than once.
        """
        entries = list(entries)
        seen: set[str] = set()
        twice: list[str] = []
        claimed = itertools.chain(
            (f"Megatron {e.megatron}" for e in entries),
            (f"Hugging Face {name}" for e in entries for name in e.hf_names),
            (f"Hugging Face {name}" for name in itertools.chain(unused or (), copies or ())),
        )
        for name in claimed:
            if name in seen:
                twice.append(f"{name} appears twice")
            seen.add(name)
        if twice:
            raise ConversionError(problems("the mapping table is wrong", twice))
        return cls({e.megatron: e for e in entries}, dict(unused or {}), dict(copies or {}))

    def hf_to_entry(self) -> dict[str, Entry]:
        """Return the entry that each Hugging Face tensor belongs to."""
        return {name: entry for entry in self.entries.values() for name in entry.hf_names}


def check_coverage(
    table: MappingTable, *, hf_shapes: Mapping[str, Shape], megatron_shapes: Mapping[str, Shape], source: str
) -> None:
    """Compare table, Hugging Face folder and model, from names and shapes alone.

    Args:
        hf_shapes: shape of every tensor in the Hugging Face folder.
        megatron_shapes: full (unsharded) shape of every parameter of the model.
        source: the Hugging Face folder, for the message.

    Raises:
        ConversionError: lists everything that is missing, extra or has another shape, in both directions.
    """
    entries = table.entries
    by_hf = table.hf_to_entry()
    known = by_hf.keys() | table.unused.keys() | table.copies.keys()
    errors: list[str] = []
    errors += [
        f"tensor without an entry (unknown to this model): {n} {hf_shapes[n]}" for n in sorted(hf_shapes.keys() - known)
    ]
    errors += [f"tensor is missing: {n}" for n in sorted(by_hf.keys() - hf_shapes.keys())]
    errors += [f"Megatron parameter without an entry: {n}" for n in sorted(megatron_shapes.keys() - entries.keys())]
    errors += [f"entry without a Megatron parameter: {n}" for n in sorted(entries.keys() - megatron_shapes.keys())]
    for name in sorted(entries.keys() & megatron_shapes.keys()):
        errors += _shape_problems(entries[name], hf_shapes, megatron_shapes[name])
    if errors:
        raise ConversionError(problems(f"{source} does not fit the model its config.json describes", errors))


def _shape_problems(entry: Entry, hf_shapes: Mapping[str, Shape], expected: Shape) -> list[str]:
    """Run the layout on meta tensors: shapes are checked without reading a byte."""
    if any(name not in hf_shapes for name in entry.hf_names):
        return []
    described = ", ".join(f"{name} {hf_shapes[name]}" for name in entry.hf_names[:_DESCRIBED])
    described += f" and {len(entry.hf_names) - _DESCRIBED} more" if len(entry.hf_names) > _DESCRIBED else ""
    try:
        meta = {name: torch.empty(hf_shapes[name], device="meta") for name in entry.hf_names}
        full = entry.to_megatron(meta)
        back = entry.to_hf(full)
    except (RuntimeError, ValueError) as error:
        return [f"wrong shape: {described} cannot become {entry.megatron} {expected} ({error})"]
    if tuple(full.shape) != expected:
        return [f"wrong shape: {described} gives {tuple(full.shape)}, but {entry.megatron} is {expected}"]
    return [
        f"wrong shape: {name} is {hf_shapes[name]}, expected {tuple(x.shape)}"
        for name, x in back.items()
        if tuple(x.shape) != hf_shapes[name]
    ]
