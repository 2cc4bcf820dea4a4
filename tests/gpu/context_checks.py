"""What the ranks of the tests of context parallelism on GPUs run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llava_mcore.training.fetch import SkipBudget, fetch_step
from llava_mcore.training.step import train_step
from tests.parallel.checks import join
from tests.parallel.context_checks import ROUNDED, Layout, configure
from tests.parallel.gradient_checks import open_loader
from tests.parallel.training_checks import make_trainer

STEPS = 4
LOCAL = "local"
WAYS: tuple[str | None, ...] = (LOCAL, None, "p2p", "a2a", "all_gather", "a2a+p2p")
"""Torch's layers, and with Transformer Engine's what --cp-comm-type takes for packs."""


def losses(
    layout: Layout, cases: dict[str, dict[str, Any]], save_dir: str, ways: Sequence[str | None] = WAYS
) -> dict[Any, Any]:
    """Return losses and gradient norms of a few steps of each case, packed: with torch's layers, and with Transformer
    Engine's in every way."""
    tp, cp, pp = layout
    neighbors = 2 if cp == 4 else None
    groups = join(tp, pp, cp=cp, a2a=neighbors)
    found = {}
    for name, case in cases.items():
        for way in ways:
            if way == "a2a+p2p" and neighbors is None:
                continue
            flags: dict[str, Any] = {"training.global_batch_size": 3, "training.train_iters": STEPS}
            flags |= {"training.precision": "bf16", "optimizer.lr": 2e-5, "optimizer.lr_warmup_fraction": 0.0}
            if way != LOCAL:
                flags |= {"model.transformer_impl": "transformer_engine"}
                flags |= {"parallel.cp_comm_type": way} if cp > 1 else {}
                flags |= {"parallel.cp_a2a_size": neighbors} if way == "a2a+p2p" else {}
            run = configure(layout, case["checkpoint"], save_dir, **flags)
            trainer = make_trainer(groups, run)
            steps = [case["all"], case["single"], case["text"]] * STEPS
            loader = open_loader(groups, case, steps, packed=True, **ROUNDED)
            curve: dict[str, list[float]] = {"loss": [], "grad_norm": []}
            for _ in range(STEPS):
                batches, *_ = fetch_step(groups, loader, 3, SkipBudget(0.0), trainer.fields)
                step = train_step(groups, trainer.chunks, trainer.optimizer, trainer.scheduler, batches, 3)
                result = step.result()
                curve["loss"].append(result.loss)
                curve["grad_norm"].append(result.grad_norm)
            found[name, way] = curve
    return found
