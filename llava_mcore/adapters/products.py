"""The products of LoRA as one operation each: a model has hundreds of them, and the host must start every kernel.

Adapters of layers that are one layer here share one product: their A are stacked, and their B are blocks of a matrix
that is zero elsewhere. These matrices are assembled when they are needed and not kept.

s: tokens, h: inputs, o: outputs, r: sum of the ranks of the layers that have an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llava_mcore.weights.layouts import TensorTransform


@dataclass(frozen=True)
class Block:
    """Where one B [rows, rank] is in the matrix of all: its rows, columns from `start` to `stop`, and its factor."""

    rows: Tensor
    start: int
    stop: int
    factor: float


class SharedMatrices:
    """Memory for matrices of zeros and blocks, shared by layers of the same form one after the other."""

    def __init__(self) -> None:
        self._forms: dict[tuple[Any, ...], int] = {}
        self._matrices: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def form_of(self, shape: tuple[int, int], blocks: Sequence[Block]) -> int:
        """Return the number of a form: which elements of a matrix belong to blocks."""
        form = (shape, *((x.start, x.stop, x.rows.numpy().tobytes()) for x in blocks))
        return self._forms.setdefault(form, len(self._forms))

    def matrix(self, form: int, shape: tuple[int, int], like: Tensor) -> Tensor:
        """Return the matrix of a form, of the dtype and on the device of a tensor."""
        key = (form, like.dtype, like.device)
        if key not in self._matrices:
            self._matrices[key] = like.new_zeros(shape)
        return self._matrices[key]


class BlockMatrix:
    """All B of a layer, [o, r], of parameters that belong to blocks of rows."""

    def __init__(self, blocks: Sequence[Block], shape: tuple[int, int], memory: SharedMatrices) -> None:
        self.blocks, self.shape, self._memory = blocks, shape, memory
        self._form = memory.form_of(shape, blocks)
        self.is_single = len(blocks) == 1 and len(blocks[0].rows) == shape[0] and blocks[0].factor == 1.0

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return [o, r] of the parameters of all blocks; overwritten by the next use of a layer of the same form."""
        if self.is_single:
            return parts[0]
        first = parts[0]
        full = self._memory.matrix(self._form, self.shape, first)
        for block, part in zip(self._on(first.device), parts, strict=True):
            scaled = part if block.factor == 1.0 else part * block.factor
            full[:, block.start : block.stop].index_copy_(0, block.rows, scaled)
        return full

    def parts(self, full: Tensor) -> list[Tensor]:
        """Return the gradients of the parameters of all blocks, of the gradient [o, r]."""
        if self.is_single:
            return [full]
        parts = [full[:, x.start : x.stop].index_select(0, x.rows) for x in self._on(full.device)]
        return [x if block.factor == 1.0 else x.mul_(block.factor) for block, x in zip(self.blocks, parts, strict=True)]

    def rows_on(self, device: torch.device) -> list[Tensor]:
        """Return the rows of every block, on a device."""
        return [block.rows for block in self._on(device)]

    def _on(self, device: torch.device) -> Sequence[Block]:
        """Return the blocks with rows on a device, where they stay."""
        if self.blocks[0].rows.device != device:
            self.blocks = [Block(x.rows.to(device), x.start, x.stop, x.factor) for x in self.blocks]
        return self.blocks


def block_matrix(
    layout: TensorTransform,
    rows: Sequence[int],
    columns: Sequence[tuple[int, int] | None],
    factors: Sequence[float],
    memory: SharedMatrices,
) -> BlockMatrix:
    """Return the matrix of all B of a layer.

    Args:
        layout: the blocks that make up the layer's rows.
        rows: of every block.
        columns: of every block, where they begin and end; None: the block has no adapter.
        factors: of every block.
        memory: shared by the layers of a model.
    """
    first = torch.tensor([0, *rows]).cumsum(0).tolist()
    origin = layout.to_megatron(*(torch.arange(a, a + n)[:, None] for a, n in zip(first, rows, strict=False)))
    row_of = torch.empty(len(origin), dtype=torch.int64)
    row_of[origin[:, 0]] = torch.arange(len(origin))  # row of the layer, by the number of the row in the blocks
    block_values = zip(first, rows, columns, factors, strict=False)
    blocks = [Block(row_of[a : a + n], *span, factor) for a, n, span, factor in block_values if span is not None]
    return BlockMatrix(blocks, (len(origin), max(block.stop for block in blocks)), memory)


@dataclass(frozen=True)
class Activated:
    """An activation and its argument, from which the backward pass computes the result again instead of keeping it.

    `activation`: returns the result. `source`: its argument, which the activation keeps anyway.
    """

    activation: Callable[[Tensor], Tensor]
    source: Tensor


class Down(torch.autograd.Function):
    """A x of all members side by side, [..., r], of x [..., h] and every A [rank, h].

    The backward pass needs x: it is kept, or computed again if x is the result of an activation. Then the activation's
    argument is saved, where autograd's hooks see it: recomputation and the warm-up of graphs rely on them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, activated: Activated | None, *A: Tensor) -> Tensor:
        ctx.activation = None if activated is None else activated.activation
        ctx.save_for_backward(*A, x if activated is None else activated.source)
        return F.linear(x, _below_each_other(A))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        *A, x = ctx.saved_tensors  # read once: under torch's checkpoint a second read fails
        of_x = gradient @ _below_each_other(A) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return of_x, None, *(None for _ in A)
        if ctx.activation is not None:
            x = ctx.activation(x)
        of_A = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
        return of_x, None, *of_A.split([len(one) for one in A])


class AddUp(torch.autograd.Function):
    """output + scaling * B a, [..., o], of a [..., r] and the B of all blocks.

    It is written where `output` is, which no product keeps for its backward pass: a copy would be as large as what the
    product itself reads and writes. If something did keep it, autograd would raise an error.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, a: Tensor, matrix: BlockMatrix, scaling: float, *B: Tensor) -> Tensor:
        ctx.matrix, ctx.scaling = matrix, scaling
        ctx.save_for_backward(a, *B)
        flat = output.detach().flatten(0, -2).addmm_(a.flatten(0, -2), matrix.joined(B).t(), alpha=scaling)
        return flat.view(output.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        a, *B = ctx.saved_tensors
        of_a = None
        if ctx.needs_input_grad[1]:
            of_a = (gradient @ ctx.matrix.joined(B)).mul_(ctx.scaling)
        if not any(ctx.needs_input_grad[4:]):
            return gradient, of_a, None, None, *(None for _ in B)
        of_B = (gradient.flatten(0, -2).t() @ a.flatten(0, -2)).mul_(ctx.scaling)
        return gradient, of_a, None, None, *ctx.matrix.parts(of_B)


class BaseRows(torch.autograd.Function):
    """W x, [..., o], of a frozen W [o, h] whose rows read different x [..., h]; zero in the rows of none of them.

    W is made again for the backward pass: it may be quantized, and then nobody else keeps it.
    """

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Tensor], rows: Sequence[Tensor | None], *x: Tensor) -> Tensor:
        """Args:
        make: returns W.
        rows: of every x; None: all.
        """
        ctx.make, ctx.rows = make, rows
        W = make()
        if rows[0] is None:
            return F.linear(x[0], W)
        y = x[0].new_zeros(*x[0].shape[:-1], len(W))
        for own_rows, one in zip(rows, x, strict=True):
            y[..., own_rows] = F.linear(one, W[own_rows])
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        W = ctx.make()
        of_x = [gradient @ W if own_rows is None else gradient[..., own_rows] @ W[own_rows] for own_rows in ctx.rows]
        return None, None, *of_x


def _below_each_other(A: Sequence[Tensor]) -> Tensor:
    """Return the members' A as one, [r, h]."""
    return A[0] if len(A) == 1 else torch.cat(list(A))
