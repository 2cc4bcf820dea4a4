"""Operations on a chunk of tokens and its logits, in torch; `logit_gradients.py` has two of them in Triton.

c: tokens, rows: this rank's rows of the padded vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type of losses and sums: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in the wide type, without rounding even if a and b are in half precision."""
    wide = wide_type(a.dtype)
    if a.is_cuda and a.dtype != wide:
        return torch.mm(a, b, out_dtype=wide)
    return torch.mm(a.to(wide), b.to(wide))


def add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Add a @ b to the wide `total` in place; None is 0."""
    if total is None:
        return product(a, b)
    if a.is_cuda and a.dtype != total.dtype:
        return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    return total.addmm_(a.to(total.dtype), b.to(total.dtype))


def scaled(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return gradient * scale in `dtype`, rounded once. The gradient is kept: backward may run again."""
    return torch.mul(gradient, scale, out=torch.empty_like(gradient, dtype=dtype))


def put_rows(target: Tensor, place: Tensor | slice, values: Tensor) -> None:
    """Write rows, rounded to the target's type."""
    if isinstance(place, slice):
        target[place] = values
    else:
        target.index_copy_(0, place, values.to(target.dtype))


def log_sum_and_target(logits: Tensor, local: Tensor, num_true: int) -> tuple[Tensor, Tensor]:
    """Compute the same as the kernel of this name, by torch's operations."""
    index, is_mine = _local_index(local, logits.shape[1])
    return logits[:, :num_true].logsumexp(dim=-1), logits.gather(1, index).where(is_mine, 0.0).squeeze(1)


def torch_gradients(
    logits: Tensor, local: Tensor, log_sum: Tensor, at_target: Tensor, num_true: int, dtype: torch.dtype
) -> Tensor:
    """Compute the same as `logit_gradients.into_gradients`, by torch's operations; for any type."""
    logits[:, num_true:] = -torch.inf
    logits -= log_sum.unsqueeze(1)
    index, is_mine = _local_index(local, logits.shape[1])
    at_index = at_target.unsqueeze(1).where(is_mine, logits.gather(1, index).exp())
    out = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
    torch.exp(logits, out=out)
    return out.scatter_(1, index, at_index.to(dtype))


def _local_index(local: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return a row of this rank, [c, 1], and whether it is the label's; else it is an arbitrary one."""
    is_mine = (local >= 0) & (local < num_rows)
    return local.clamp(0, num_rows - 1).unsqueeze(1), is_mine.unsqueeze(1)
