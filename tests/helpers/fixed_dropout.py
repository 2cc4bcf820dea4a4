"""Dropout with masks that are the same here and in PEFT: they depend on a layer's name and on positions alone."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from llava_mcore.adapters.lora import LinearAdapter

RATE = 0.25
TEXT = "language_model."
"""In the names of layers whose masks differ from token to token. Tiles and their tokens are in another order here."""

SHARED = ".shared_expert."
"""In the names of layers that read the tokens of all samples at once in transformers."""
OF_FEATURES = (".cross_attn.k_proj", ".cross_attn.v_proj")
"""At the ends of names of layers that read the features of images, tile by tile in transformers."""


def mask(layer: str, num_tokens: int, width: int) -> Tensor:
    """Return the factors of what a layer reads, [tokens, width]."""
    generator = torch.Generator().manual_seed(zlib.crc32(layer.encode()))
    differ = TEXT in layer and SHARED not in layer and not layer.endswith(OF_FEATURES)
    num_rows = num_tokens if differ else 1
    kept = torch.rand(num_rows, width, generator=generator) >= RATE
    return (kept / (1 - RATE)).expand(num_tokens, -1)


class FixedDropout(nn.Module):
    """In the place of the dropout of one of PEFT's layers."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Return x [.., tokens, width] with the layer's mask."""
        return x * mask(self.layer, x.shape[-2], x.shape[-1])


def fix_peft(model: nn.Module) -> None:
    """Give every adapted layer of a PEFT model its fixed mask, in training as PEFT would draw it."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            assert all(isinstance(x, nn.Dropout) and x.p == RATE for x in module.lora_dropout.values())
            layer = name.removeprefix("base_model.model.")
            module.lora_dropout.update({key: FixedDropout(layer) for key in module.lora_dropout})


@contextmanager
def fixed_here() -> Iterator[None]:
    """Let our adapters use these masks, or a rank's part of them."""

    def dropped(adapter: LinearAdapter, x: Tensor, member: int) -> Tensor:
        assert adapter.dropout == RATE
        division = adapter.division
        over_features = adapter.divides_input and division.is_row_parallel
        over_tokens = adapter.divides_input and not division.is_row_parallel
        tokens, width = x.shape[0], x.shape[-1]
        whole = mask(
            adapter.linear.members[member].name,
            tokens * (division.tp_size if over_tokens else 1),
            width * (division.tp_size if over_features else 1),
        )
        own = whole.split(tokens)[division.tp_rank if over_tokens else 0]
        own = own.split(width, dim=1)[division.tp_rank if over_features else 0]
        return x * own.view(tokens, *(1,) * (x.ndim - 2), width)

    with patch.object(LinearAdapter, "_dropped", dropped):
        yield
