"""Hugging Face's activation names and the functions megatron-core layers call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llava_mcore.errors import ConversionError


class StatelessActivation(nn.Module):
    """One of Transformer Engine's activations, without its own state in checkpoints.

    That state (of quantizers that are not used here) has no tensor-parallel sharding: at tp 2 nothing could be saved.
    """

    def __init__(self, operation: nn.Module) -> None:
        super().__init__()
        self._operation = (operation,)  # torch does not find a module inside a tuple

    def forward(self, x: Tensor) -> Tensor:
        return self._operation[0](x)


def quick_gelu(x: Tensor) -> Tensor:
    """Return x * sigmoid(1.702 x), of any shape (Hendrycks & Gimpel 2016, section 2).

    megatron-core's is compiled at every start on a GPU, for a kernel instead of three.
    """
    return x * torch.sigmoid(1.702 * x)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
}


def activation(name: str, *, where: str) -> Callable[[Tensor], Tensor]:
    """Return the function of an HF activation name.

    Raises:
        ConversionError: the name is unknown; `where` is the config key, for the message.
    """
    if name not in _ACTIVATIONS:
        raise ConversionError(
            f"{where}: activation {name!r} is not supported; known: {', '.join(sorted(_ACTIVATIONS))}"
        )
    return _ACTIVATIONS[name]
