"""LoRA on one of megatron-core's linear layers, divided over tensor-parallel ranks as the layer is.

LoRA (Hu et al. 2021, arXiv 2106.09685): y = W x + scaling * B A x. Every Hugging Face layer has an A and a B of its
own, even if several are one layer here, so what is trained is PEFT's adapter. DoRA (Liu et al. 2024, arXiv
2402.09353) also trains the magnitude m of every row: y = m / |W + scaling * B A| * (W + scaling * B A) x, where the
norms |.| get no gradient.

LoRA's dropout is on the x of A, DoRA's on the x of both products, as PEFT has it: then m scales what W makes of the
dropped x, and W x is added as it is. Each Hugging Face layer has a mask of its own.

Where outputs are divided (column-parallel), so are B's rows, and every rank has all of A; where inputs are divided
(row-parallel), so are A's columns, and every rank has all of B. Only tensors [s, b, r] cross ranks. Only DoRA with
dropout multiplies by W a second time, and exchanges what W reads or makes as well.

s: tokens, b: samples, h: inputs of the layer, o: its outputs (a rank's, where they are divided), r: sum of the ranks
of the members that have an adapter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from torch import Tensor, nn
from torch.nn import Parameter

from llava_mcore.adapters.linear_layers import MegatronLinear
from llava_mcore.adapters.products import Activated, AddUp, BaseRows, BlockMatrix, Down, SharedMatrices, block_matrix
from llava_mcore.adapters.targets import LoraSettings


class Factors(nn.Module):
    """The matrices of one Hugging Face layer, or a rank's part of them.

    `lora_A` [lora_rank, h]; `lora_B`: one matrix [rows, lora_rank] for each block of rows that ranks divide evenly,
    usually a single one; `magnitude`: the same of DoRA's magnitudes, or empty.
    """

    def __init__(self, lora_A: Parameter, lora_B: Sequence[Parameter], magnitude: Sequence[Parameter] = ()) -> None:
        super().__init__()
        self.lora_A = lora_A
        self.lora_B = nn.ParameterList(lora_B)
        self.magnitude = nn.ParameterList(magnitude)


@dataclass(frozen=True)
class Division:
    """How a layer is divided over ranks, and whether its tokens are divided where its features are not.

    `gathers`: ranks gather the outputs that they have divided. `own_tokens`: every rank has the whole layer, for tokens
    that no other has (tp_size is 1 then).
    """

    tp_size: int
    tp_rank: int
    is_row_parallel: bool
    sequence_parallel: bool
    gathers: bool = False
    own_tokens: bool = False


class LinearAdapter:
    """One adapter on one of megatron-core's linear layers. The model owns the factors; this only uses them."""

    def __init__(
        self,
        plan: LoraSettings,
        linear: MegatronLinear,
        division: Division,
        factors: Mapping[int, Factors],
        rows: Sequence[int],
        memory: SharedMatrices,
    ) -> None:
        """
        Args:
            factors: by the number of the member in `linear`, for those that have an adapter.
            rows: of every block of the layer (see `MegatronLinear.blocks`).
            memory: for matrices of all B, shared by all layers of a model.
        """
        self.linear, self.division, self.dora, self.dropout, self.rows = linear, division, plan.dora, plan.dropout, rows
        self.layout, self.members = linear.blocks(division.tp_size)
        self.factors = dict(sorted(factors.items()))
        self.scaling = {i: plan.scaling(linear.members[i].name) for i in self.factors}
        self.base_squares: Tensor | None = None
        self._common_scaling, self._matrix = self._block_matrix(memory)

    def _block_matrix(self, memory: SharedMatrices) -> tuple[float, BlockMatrix]:
        """Return the factor of all members (1 if they differ) and the matrix of all B."""
        values = set(self.scaling.values())
        common = values.pop() if len(values) == 1 else 1.0
        spans, start = {}, 0
        for member, one in self.factors.items():
            spans[member] = (start, start + one.lora_A.shape[0])
            start = spans[member][1]
        columns = [spans.get(member) for member in self.members]
        factors = [self.scaling.get(member, common) / common for member in self.members]
        return common, block_matrix(self.layout, self.rows, columns, factors, memory)

    def __call__(
        self,
        x: Tensor,
        output: Tensor,
        bias: Tensor | None,
        weight: Callable[[], Tensor],
        *,
        training: bool,
        activated: Activated | None = None,
    ) -> Tensor:
        """Return the layer's output with what the adapter adds.

        Args:
            x: what the layer reads: [s, b, h], [s / tp, b, h] before a column-parallel layer with sequence parallelism.
            output: [s, b, o], [s / tp, b, o] after a row-parallel layer with sequence parallelism.
            bias: [o], if it is a part of `output`.
            weight: returns the layer's matrix [o, h].
            activated: the activation that x is the result of, so that x need not be kept; None: x is kept.
        """
        # A x. With DoRA and dropout the frozen matrix multiplies the dropped x too.
        base: Tensor | None = None
        if self.dora and self.dropout and training:
            a, base = self._dropped_products(x, weight)
        else:
            a = self._low_rank(x, activated, training=training)
        # Each tensor-parallel rank holds a partial sum of A x (row-parallel) or A x of its own tokens (sequence
        # parallelism).
        a = self._summed(a) if self.division.is_row_parallel else self._all_tokens(a)
        # Usual case: B A x of all members is added to the output at once.
        if not (self.dora or self.division.gathers):
            of_blocks = self._by_block([one.lora_B for one in self.factors.values()])
            B = [x for _, _, x in of_blocks if x is not None]
            result: Tensor = AddUp.apply(output, a, self._matrix, self._common_scaling, *B)
            return result
        # Otherwise B A x is needed by itself: to be gathered, or scaled.
        all_B = self.all_B()
        added = F.linear(a, all_B)
        if self.division.gathers:
            added = tensor_parallel.gather_from_tensor_model_parallel_region(added)
        if not self.dora:
            return output + added
        # DoRA rescales the rows of the sum; the bias is not scaled.
        scale = self._scale(weight(), all_B)
        if base is None:
            base = output if bias is None else output - bias
        return output + (scale - 1) * base + scale * added

    def _low_rank(self, x: Tensor, activated: Activated | None, *, training: bool) -> Tensor:
        """Return A x of all members side by side, [.., b, r], of the part of x that this rank has."""
        if not (self.dropout and training):
            return Down.apply(x, activated, *(one.lora_A for one in self.factors.values()))
        products = [F.linear(self._dropped(x, i), one.lora_A) for i, one in self.factors.items()]
        return torch.cat(products, dim=-1)

    def _summed(self, y: Tensor) -> Tensor:
        """Return the sum of the parts that the ranks of a row-parallel layer have of a product."""
        if self.division.tp_size == 1:
            return y
        if self.division.sequence_parallel:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(y)
        return tensor_parallel.reduce_from_tensor_model_parallel_region(y)

    def _dropped_products(self, x: Tensor, weight: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """Return what `_low_rank` does and W x like the layer's output, both of each member's x after dropout."""
        dropped = {i: self._dropped(x, i) for i in self.factors}
        a = torch.cat([F.linear(dropped[i], one.lora_A) for i, one in self.factors.items()], dim=-1)
        rows = [self._rows_of(i, x.device) for i in dropped]
        base: Tensor = BaseRows.apply(weight, rows, *map(self._all_tokens, dropped.values()))
        if self.division.gathers:
            base = tensor_parallel.gather_from_tensor_model_parallel_region(base)
        return a, self._summed(base) if self.division.is_row_parallel else base

    def _all_tokens(self, x: Tensor) -> Tensor:
        """Return what the layer's product reads: a column-parallel one reads the tokens of all ranks."""
        division = self.division
        if division.tp_size == 1 or division.is_row_parallel:
            return x
        if division.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True)
        return tensor_parallel.copy_to_tensor_model_parallel_region(x)

    def _rows_of(self, member: int, device: torch.device) -> Tensor | None:
        """Return the rows of the layer that belong to a member; None: all."""
        if set(self.members) == {member}:
            return None
        owners = [owner for owner in self.members if owner in self.factors]
        rows_of_blocks = self._matrix.rows_on(device)
        return torch.cat([rows for rows, owner in zip(rows_of_blocks, owners, strict=True) if owner == member])

    def _dropped(self, x: Tensor, member: int) -> Tensor:
        """Apply dropout to what a member reads; ranks that hold different parts of x draw different numbers.

        With sequence parallelism TransformerBlock has made them do so already: a second fork would begin with the state
        that the first one began with, and a recomputation with another one.
        """
        forks = self.divides_input and not self.division.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if forks else contextlib.nullcontext():
            return F.dropout(x, self.dropout)

    @property
    def divides_input(self) -> bool:
        """Whether ranks hold different parts of what the layer reads: features, tokens or images."""
        division = self.division
        return division.own_tokens or (
            division.tp_size > 1 and (division.is_row_parallel or division.sequence_parallel)
        )

    def _all_A(self) -> Tensor:
        """Return the members' A, stacked, [r, h]."""
        parts: list[Tensor] = [one.lora_A for one in self.factors.values()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def all_B(self) -> Tensor:
        """Return the members' B times their scaling, [o, r], in the layer's order of rows.

        Each member has columns of its own, which are zero in the rows of others.
        """
        lora_ranks = {i: one.lora_A.shape[0] for i, one in self.factors.items()}
        total, first = sum(lora_ranks.values()), next(iter(self.factors.values())).lora_A
        before = dict(zip(lora_ranks, torch.tensor([0, *lora_ranks.values()]).cumsum(0).tolist(), strict=False))
        blocks = []
        for member, rows, B in self._by_block([one.lora_B for one in self.factors.values()]):
            if B is None:
                blocks.append(first.new_zeros(rows, total))
            else:
                after = total - before[member] - lora_ranks[member]
                blocks.append(F.pad(B * self.scaling[member], (before[member], after)))
        return self.layout.to_megatron(*blocks)

    def _by_block(self, lists: Sequence[nn.ParameterList]) -> list[tuple[int, int, Tensor | None]]:
        """Return each block's member, rows and parameter (None: no adapter), of the members' lists of parameters."""
        remaining = {member: iter(values) for member, values in zip(self.factors, lists, strict=True)}
        return [
            (member, rows, next(remaining[member]) if member in remaining else None)
            for member, rows in zip(self.members, self.rows, strict=True)
        ]

    def _scale(self, weight: Tensor, all_B: Tensor) -> Tensor:
        """Return DoRA's m / |W + scaling * B A| of every row, [o]; 1 where there is no adapter."""
        norms = self.layout.to_hf(self.row_norms(weight, all_B).to(weight.dtype))
        magnitudes = self._by_block([one.magnitude for one in self.factors.values()])
        parts = [
            torch.ones_like(norm) if magnitude is None else magnitude / norm.clamp(min=torch.finfo(norm.dtype).tiny)
            for norm, (_, _, magnitude) in zip(norms, magnitudes, strict=True)
        ]
        scale = self.layout.to_megatron(*parts)
        return tensor_parallel.gather_from_tensor_model_parallel_region(scale) if self.division.gathers else scale

    @torch.no_grad()
    def row_norms(self, weight: Tensor, all_B: Tensor) -> Tensor:
        """Return the norms of the rows of W + B A, [o], in fp32, without computing that matrix.

        |W + B A|² = |W|² + 2 <W A', B> + <B A A', B>, row by row; |W|² never changes.
        """
        A = self._all_A()
        if self.base_squares is None:
            self.base_squares = weight.float().square().sum(1)
        B = all_B.float()
        squares = self.base_squares + 2 * (F.linear(weight, A).float() * B).sum(1)
        squares += ((B @ F.linear(A, A).float()) * B).sum(1)
        if self.division.is_row_parallel and self.division.tp_size > 1:
            squares = tensor_parallel.reduce_from_tensor_model_parallel_region(squares)
        return squares.sqrt()
