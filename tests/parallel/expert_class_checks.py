"""Training of Qwen3-VL-MoE and Qwen3.5-MoE on given conversations, where ranks divide layers and experts."""

from __future__ import annotations

from typing import Any

from tests.parallel.answer_checks import ASKED, train_and_ask
from tests.parallel.checks import join
from tests.parallel.class_curve_checks import RECOMPUTED, _flags, _steps
from tests.parallel.expert_checks import Layout
from tests.parallel.training_checks import run_config

ADAPTERS: dict[str, Any] = {"adapter.r": 4, "adapter.vision_r": 2, "adapter.projection_r": 2, "adapter.expert_r": 2}
Curves = dict[str, dict[str, list[float]]]


def train(layout: Layout, cases: dict[str, dict[str, Any]], save_dir: str, most_steps: int) -> Curves:
    """Train each case on a pack a step, everything and with adapters on everything; the latter recomputed."""
    groups = join(*layout)
    found = {}
    given = {
        "parallel.expert_model_parallel_size": groups.ep_size,
        "parallel.expert_tensor_parallel_size": groups.etp_size,
        "parallel.sequence_parallel": groups.tp_size > 1,
        "parallel.use_distributed_optimizer": True,
    }
    for name, case in cases.items():
        ways: dict[str, dict[str, Any]] = {name: {}}
        if groups.etp_size == 1:
            ways[f"{name}, adapters"] = ADAPTERS | RECOMPUTED
        for way, more in ways.items():
            flags = _flags(case, 1, packed=True) | given | more
            run = run_config(groups.tp_size, groups.pp_size, case["checkpoint"], save_dir, **flags)
            found[way] = _steps(groups, run, case, 1, most_steps, packed=True)
    return found


def answers_while_training(layout: Layout, checkpoint: str, data: str, save_dir: str) -> dict[str, Any]:
    """Ask, train and ask in turns: see `train_and_ask`."""
    groups = join(*layout)
    flags = {
        "parallel.expert_model_parallel_size": groups.ep_size,
        "parallel.sequence_parallel": groups.tp_size > 1,
        "parallel.use_distributed_optimizer": True,
    }
    return train_and_ask(groups, checkpoint, data, save_dir, ASKED | flags, steps=1)
