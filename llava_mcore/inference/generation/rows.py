"""The sequences that are being continued: what all layers need to know to read their caches.

r: sequences (rows).
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from llava_mcore.parallel.context import DividedRow

PIECE = 256
"""The capacity of a cache, in tokens, is a multiple of this."""


def whole_pieces(length: int) -> int:
    """Return a number of tokens, rounded up to whole pieces of a cache."""
    return math.ceil(length / PIECE) * PIECE


class CachedRows:
    """The state of the sequences, for the caches of all layers.

    `prefilled`: the row whose prompt is being read, of `prompt_length` tokens before its padding; None while every row
    gets one token. `row`: int64 [1], the same row on the device, for graphs. `lengths`: int64 [r] on the device, tokens
    of each row before this pass. `num_columns`: tokens of a cache that the pass reads, the longest row's or more.
    `num_growths`: how often a cache has been reallocated. `sees_images`: bool [r], whether the tokens of a row's answer
    see an image, in a model whose layers attend to images. `contexts`: the ranks that divide the tokens of a prompt;
    None: each has all of them. `masks`: those of this pass, by their layers' window and their type.
    """

    def __init__(self, num_rows: int, device: torch.device, contexts: dist.ProcessGroup | None = None) -> None:
        self.num_rows, self.contexts = num_rows, contexts
        self.prefilled: int | None = None
        self.prompt_length = 0
        self.row = torch.zeros(1, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.num_columns = 0
        self.num_growths = 0
        self.sees_images = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self.masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return which tokens of the caches the next token of each row sees, [r, 1, 1, num_columns].

        dtype: bool, or that of what is added to scores: 0 for tokens that are seen, else -inf.
        """
        key = window, dtype
        if key not in self.masks:
            columns, last = torch.arange(self.num_columns, device=self.lengths.device), self.lengths[:, None]
            seen = columns <= last
            if window is not None:
                seen &= columns > last - window
            mask = seen[:, None, None]
            if dtype != torch.bool:
                mask = mask.new_zeros(mask.shape, dtype=dtype).masked_fill(~mask, float("-inf"))
            self.masks[key] = mask
        return self.masks[key]

    def divided(self, x: Tensor) -> DividedRow | None:
        """Return the prompt of whose tokens this rank has x [s, ...]; None: it has all of them."""
        return None if self.contexts is None else DividedRow.of(len(x), None, x.device, self.contexts)
