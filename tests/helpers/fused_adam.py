"""An AdamW that keeps its state as Transformer Engine's FusedAdam does, which itself runs on GPUs only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core import optimizer
from megatron.core.optimizer import distrib_optimizer


class FusedAdam(torch.optim.Optimizer):
    """Counts updates for each group that is not empty, and makes moments at the first one."""

    def __init__(self, params: Any, *, adam_w_mode: bool, capturable: bool, **defaults: Any) -> None:
        assert adam_w_mode and not capturable
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in (group for group in self.param_groups if group["params"]):
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
                _update(param, state["exp_avg"], state["exp_avg_sq"], group)


def _update(param: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, group: dict[str, Any]) -> None:
    """One update of AdamW (Loshchilov and Hutter, 2019, algorithm 2)."""
    assert param.grad is not None
    beta1, beta2 = group["betas"]
    exp_avg.lerp_(param.grad, 1 - beta1)
    exp_avg_sq.lerp_(param.grad.square(), 1 - beta2)
    param.mul_(1 - group["lr"] * group["weight_decay"])
    denominator = (exp_avg_sq / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
    param.addcdiv_(exp_avg / (1 - beta1 ** group["step"]), denominator, value=-group["lr"])


@contextlib.contextmanager
def in_place_of_torch() -> Iterator[None]:
    """Let megatron-core build this optimizer, and treat it as Transformer Engine's."""
    with (
        mock.patch.multiple(optimizer, Adam=FusedAdam, USING_PYTORCH_OPTIMIZER=False),
        mock.patch.multiple(distrib_optimizer, HAVE_APEX_OR_TE=True, USING_TE_OPTIMIZER=True),
    ):
        yield
