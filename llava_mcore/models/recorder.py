"""Keeps some tokens of the outputs of modules.

s: tokens, b: samples, f: features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

NUM_TOKENS = 32
"""Number of tokens of each output that are kept: a wrong weight affects every token."""


class Recorder:
    """Keeps some tokens [tokens, f] of the outputs of modules, float32, in the order of execution."""

    def __init__(self, gather: Callable[[str, Tensor], Tensor] | None = None) -> None:
        """gather: returns all tokens [b, s, f] of an output of which this rank has a part; None: it has all."""
        self.outputs: dict[str, Tensor] = {}
        self._gather = gather

    def keep(self, name: str, x: Tensor) -> None:
        """Keep evenly spaced tokens of an output [b, s, f]; only sample 0."""
        x = x.detach()
        tokens = (x if self._gather is None else self._gather(name, x))[0].float()
        chosen = torch.linspace(0, tokens.shape[0] - 1, min(NUM_TOKENS, tokens.shape[0])).long()
        self.outputs[name] = tokens[chosen].cpu()

    def watch(self, module: nn.Module, take: Callable[[Any], dict[str, Tensor]]) -> None:
        """Keep the result of `take` for a module's output: a tensor [b, s, f] for each name."""

        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            for name, x in take(output).items():
                self.keep(name, x)

        module.register_forward_hook(hook)

    def watch_input(self, module: nn.Module, name: str, transform: Callable[[Tensor], Tensor]) -> None:
        """Keep a module's input."""

        def hook(_module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = inputs[0] if inputs else kwargs["hidden_states"]
            self.keep(name, transform(x))

        module.register_forward_pre_hook(hook, with_kwargs=True)
