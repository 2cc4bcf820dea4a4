"""Gradients of one step of given conversations, inside a test world."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from llava_mcore.config.schema import RunConfig
from llava_mcore.data.samples import Conversation
from llava_mcore.models.trainable import whole_name
from llava_mcore.parallel.groups import Groups
from llava_mcore.training.fetch import SkipBudget, fetch_step
from llava_mcore.training.step import forward_backward
from tests.helpers.class_checks import batch_once
from tests.parallel.class_curve_checks import GivenLoader
from tests.parallel.training_checks import make_trainer


def open_loader(
    groups: Groups, case: dict[str, Any], steps: Sequence[Sequence[Conversation]], *, packed: bool, **rounded: int
) -> GivenLoader | None:
    """Return the loader of these micro-batches, on ranks that load data. `rounded`: multiples of lengths, see
    `batch_of`."""
    if not groups.loads_data:
        return None
    hf = Path(case["hf"])
    return GivenLoader([batch_once(hf, conversations, packed=packed, **rounded) for conversations in steps])


def step_gradients(
    groups: Groups, run: RunConfig, case: dict[str, Any], *, packed: bool, **rounded: int
) -> dict[str, Any]:
    """Return losses, gradients and their norm after the backward passes of a step.

    It has a micro-batch of all conversations, one of a single image, which some rank may have no part of, and one of
    text alone.
    """
    trainer = make_trainer(groups, run)
    loader = open_loader(groups, case, [case["all"], case["single"], case["text"]], packed=packed, **rounded)
    batches, *_ = fetch_step(groups, loader, 3, SkipBudget(0.0), trainer.fields)
    for chunk in trainer.chunks:
        chunk.zero_grad_buffer()
    reports = forward_backward(trainer.chunks, batches)
    losses = [report["loss"].tolist() for report in reports if "loss" in report]
    trainer.optimizer.prepare_grads()  # hands over the gradients whose norm is taken
    named = [(model, name, p) for model in trainer.models for name, p in model.named_parameters()]
    found: dict[str, Tensor] = {whole_name(m, n): p.main_grad.clone() for m, n, p in named if p.requires_grad}
    return {"losses": losses, "norm": trainer.optimizer.get_grad_norm(), "gradients": found}
