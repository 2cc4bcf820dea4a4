"""Hugging Face's activation names and the functions megatron-core layers call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from megatron.core.activations import quick_gelu
from torch import Tensor

from llava_mcore.errors import ConversionError

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
