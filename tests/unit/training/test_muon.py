"""Muon beside megatron-core's own, on one process, and what the package's absence does."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from llava_mcore import parallel  # noqa: F401  isort: skip  before megatron.core
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

from llava_mcore.config.rules.muon import MUON_MISSING
from llava_mcore.config.sections.optimizer import OptimizerConfig
from llava_mcore.errors import ConfigError
from llava_mcore.parallel.groups import single_process, tensor_parallel_group
from llava_mcore.training.optimization.muon import MuonAndAdamW, MuonSettings
from llava_mcore.training.optimization.muon_matrices import HeldMatrix, Holders, Matrix
from llava_mcore.weights.layouts import Copy, FuseQKV

HEADS, GROUPS, SIZE, WIDTH = 4, 2, 8, 24
LR, DECAY = 0.02, 0.1


def options(**more: Any) -> OptimizerConfig:
    return OptimizerConfig(name="muon", lr=LR, muon_matmul_precision="highest", **more)


def parameters() -> dict[str, torch.nn.Parameter]:
    """Queries, keys and values of four heads in two groups, a matrix, and a vector for AdamW."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"qkv": ((HEADS + 2 * GROUPS) * SIZE, WIDTH), "proj": (WIDTH, HEADS * SIZE), "norm": (WIDTH,)}
    return {name: torch.nn.Parameter(torch.randn(*shape, generator=generator)) for name, shape in shapes.items()}


def give_gradients(to: dict[str, torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in to.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["spectral", "shape_scaling"])
def test_updates_are_those_of_megatron_core(nesterov: bool, scale: Any) -> None:
    ours, theirs = parameters(), parameters()
    muon = TensorParallelMuon(
        [theirs["qkv"], theirs["proj"]],
        lr=LR,
        momentum=0.9,
        nesterov=nesterov,
        weight_decay=DECAY,
        split_qkv=True,
        is_qkv_fn=lambda p: p is theirs["qkv"],
        qkv_split_shapes=[HEADS // GROUPS * SIZE, SIZE, SIZE],
        fp32_matmul_prec="highest",
        scale_mode=scale,
        extra_scale_factor=0.2,
    )
    adam = torch.optim.AdamW([theirs["norm"]], lr=LR, weight_decay=0.0)
    with single_process():
        groups = [
            {"params": [ours["qkv"], ours["proj"]], "weight_decay": DECAY, "optimizer": None},
            {"params": [ours["norm"]], "weight_decay": 0.0, "optimizer": "adam"},
        ]
        layouts = {"qkv": FuseQKV(HEADS, GROUPS), "proj": Copy()}
        held = [
            HeldMatrix(Matrix(name, ours[name], None, layout), ours[name], (ours[name].numel(),))
            for name, layout in layouts.items()
        ]
        settings = MuonSettings.of(options(muon_momentum=0.9, muon_nesterov=nesterov, muon_scale=scale))
        both = MuonAndAdamW(
            torch.optim.AdamW(groups, lr=LR), Holders(tuple(held), tensor_parallel_group(), None), settings
        )
        for step in range(4):
            give_gradients(ours, step)
            give_gradients(theirs, step)
            both.step()
            muon.step()
            adam.step()
    for name, parameter in ours.items():
        assert torch.allclose(parameter, theirs[name], rtol=0, atol=1e-6), name
        assert not torch.allclose(parameter, parameters()[name], atol=1e-3), name
    assert {float(state["step"]) for state in both.state.values()} == {4.0}
    assert [sorted(state) for state in both.state.values()] == [
        ["momentum_buffer", "step"],
        ["momentum_buffer", "step"],
        ["exp_avg", "exp_avg_sq", "step"],
    ]


def test_a_missing_package_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llava_mcore.training.optimization.muon.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        MuonSettings.of(options())
    assert str(error.value) == MUON_MISSING and error.value.on_all_ranks
    assert importlib.util.find_spec("emerging_optimizers") is not None
