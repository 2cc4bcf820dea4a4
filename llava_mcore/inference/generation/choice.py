"""Chooses the next token of every row from logits that are divided over tensor-parallel ranks.

r: rows, v: rows of the vocabulary with padding.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LogitsProcessorList

_STRIDE = 1_000_003
"""Distance between the random generators of two seeds, in prompts: with more, some share random numbers."""


def most_probable(logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the ids int64 [r] of the largest logits; of equal ones the lowest id, as torch.argmax. A collective call.

    Each rank sends one value and one id per row, not its part of the vocabulary.

    Args:
        logits: [r, v / tp], this rank's part.
    """
    values, ids = logits.float().max(dim=-1)
    if group.size() == 1:
        return ids
    ids = ids + group.rank() * logits.shape[-1]
    all_values, all_ids = (_gathered(x, group) for x in (values, ids))  # [tp, r]
    first = all_values.argmax(dim=0, keepdim=True)  # a lower rank has lower ids
    return all_ids.gather(0, first)[0]


def whole_logits(logits: Tensor, vocab_size: int, group: dist.ProcessGroup) -> Tensor:
    """Return float32 logits of the whole vocabulary [r, vocab_size], of parts [r, v / tp]. A collective call."""
    logits = logits.float()
    if group.size() > 1:
        logits = torch.cat(list(_gathered(logits, group)), dim=-1)
    return logits[:, :vocab_size]


def processed_choice(
    logits: Tensor, ids: Tensor, processors: LogitsProcessorList, generator: torch.Generator | None
) -> int:
    """Return the next token of one row.

    Args:
        logits: float32 [1, vocabulary].
        ids: int64 [1, s], prompt and answer so far.
        generator: of the CPU, that samples the token; None: the most probable one is taken.
    """
    scores = processors(ids, logits)
    if generator is None:
        return int(scores.argmax(dim=-1))
    return int(torch.multinomial(scores.softmax(dim=-1).cpu()[0], 1, generator=generator))


def own_generator(seed: int, index: int) -> torch.Generator:
    """Return the generator of one prompt, so that its sampling does not depend on what else is answered."""
    return torch.Generator().manual_seed((seed * _STRIDE + index) % 2**32)  # the CPU's takes 32 bits


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return [tp, ...] of every rank's tensor."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.stack(parts)
