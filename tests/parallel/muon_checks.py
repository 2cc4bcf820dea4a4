"""What the ranks of a world do with Muon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llava_mcore.config.schema import RunConfig
from llava_mcore.parallel.groups import Groups
from llava_mcore.training.saving.save import save_checkpoint
from llava_mcore.training.saving.state import TrainingProgress, resume
from tests.parallel.checks import join
from tests.parallel.resume_checks import STEPS, open_fake_loader, train_steps
from tests.parallel.training_checks import GLOBAL_BATCH, MIXED, curve, make_trainer, run_config

Layout = tuple[int, ...]
"""tp, pp, dp x cp, ep, etp, and cp if it is not 1."""
KINDS = {"plain": False, "distributed": True}
"""Whether the optimizer is sharded."""
FIRST_STEPS = 4
"""How many of the steps that one process trains are trained in other runs: the third update has two momenta in it."""


def configure(groups: Groups, checkpoint: str, save_dir: str, **flags: Any) -> RunConfig:
    """Return a run with Muon at this world's layout; its parts have rates of their own, matrices decay."""
    given = {
        "optimizer.name": "muon",
        "optimizer.muon_matmul_precision": "highest",
        "optimizer.vision_lr": 5e-4,
        "optimizer.weight_decay": 0.1,
        "parallel.context_parallel_size": groups.cp_size,
        "parallel.sequence_parallel": groups.tp_size > 1,
        "parallel.expert_model_parallel_size": groups.ep_size,
        "parallel.expert_tensor_parallel_size": groups.etp_size,
        "training.micro_batch_size": 2,
        "checkpoint.save": True,
        "checkpoint.save_optim": True,
    }
    return run_config(groups.tp_size, groups.pp_size, checkpoint, save_dir, **given | flags)


def kinds_of(layout: Layout) -> list[str]:
    """Return the kinds of optimizers at a layout: one of experts alone has to be sharded.

    Context-parallel ranks are replicas to an optimizer, so one kind shows what they do.
    """
    tp, _, _, ep, etp, *cp = layout
    return ["distributed"] if ep > 1 or etp != tp or cp else list(KINDS)


def one_layout(layout: Layout, checkpoints: dict[str, str], save_dir: str, sources: dict[str, str]) -> dict[str, Any]:
    """Train at one layout, save, and resume what this and another layout have saved.

    Args:
        checkpoints: of the models `dense` and `experts`.
        sources: by kind, the name of the other layout.
    """
    tp, pp, _, ep, etp, *cp = layout
    groups = join(tp, pp, ep, etp, *cp)
    found: dict[str, Any] = {}
    own = "-".join(map(str, layout))
    for kind in kinds_of(layout):
        flags = {"parallel.use_distributed_optimizer": KINDS[kind]}
        if ep * etp == 1:
            dense = configure(groups, checkpoints["dense"], save_dir, **flags)
            is_reference = groups.world_size == 1 and kind == "plain"
            found[kind] = curve(groups, dense, MIXED, most_steps=None if is_reference else FIRST_STEPS)
        of_experts = configure(groups, checkpoints["experts"], save_dir, **flags)
        found[f"experts, {kind}"] = curve(groups, of_experts, MIXED, most_steps=FIRST_STEPS)
        found[f"resumed, {kind}"] = _saved_and_resumed(groups, checkpoints["experts"], save_dir, kind, own, own)
        if kind in sources:
            elsewhere = _resumed(groups, checkpoints["experts"], save_dir, kind, sources[kind])
            found[f"from another layout, {kind}"] = elsewhere
    if tp > 1:
        whole = {"parallel.vision_data_parallel": True, "parallel.use_distributed_optimizer": True}
        run = configure(groups, checkpoints["experts"], save_dir, **whole)
        found["whole towers"] = curve(groups, run, MIXED, most_steps=FIRST_STEPS)
    found["half precision"] = _in_half_precision(groups, checkpoints["experts"], save_dir, kinds_of(layout))
    return found


def _in_half_precision(groups: Groups, checkpoint: str, save_dir: str, kinds: list[str]) -> list[list[float]]:
    """Return the losses with weights in half precision and iterations in bf16; fp16 where megatron-core has one
    optimizer. Replicas run both precisions with both kinds of optimizers, other layouts each with one."""
    runs = [("bf16", kinds[-1])]
    if len(kinds) > 1:
        runs += [("fp16", kinds[0])]
        runs += [("bf16", kinds[0]), ("fp16", kinds[-1])] if groups.dp_size > 1 else []
    found = []
    for precision, kind in runs:
        flags: dict[str, Any] = {"training.precision": precision, "optimizer.muon_matmul_precision": "medium"}
        flags |= {"training.loss_scale": 128.0} if precision == "fp16" else {}
        run = configure(groups, checkpoint, save_dir, **flags, **{"parallel.use_distributed_optimizer": KINDS[kind]})
        found.append(curve(groups, run, MIXED, most_steps=3)["loss"])
    return found


def _saved_and_resumed(
    groups: Groups, checkpoint: str, save_dir: str, kind: str, name: str, source: str
) -> tuple[list[float], list[float]]:
    """Train and save; return the losses after that without and with a resume."""
    run = configure(groups, checkpoint, save_dir, **_named(kind, name))
    trainer = make_trainer(groups, run)
    loader = open_fake_loader(groups, trainer, run, 0)
    train_steps(groups, trainer, run, loader)
    state = None if loader is None else loader.state()
    save_checkpoint(trainer, TrainingProgress(STEPS, STEPS * GLOBAL_BATCH), Path(checkpoint).parent / "hf", state)
    return train_steps(groups, trainer, run, loader), _resumed(groups, checkpoint, save_dir, kind, source)


def _resumed(groups: Groups, checkpoint: str, save_dir: str, kind: str, source: str) -> list[float]:
    run = configure(groups, checkpoint, save_dir, **_named(kind, source), **{"checkpoint.load_optim": True})
    trainer = make_trainer(groups, run)
    progress, _ = resume(trainer)
    assert progress.iteration == STEPS
    moments = {name for x in trainer.optimizer.chained_optimizers for s in x.optimizer.state.values() for name in s}
    assert moments <= {"step", "momentum_buffer", "exp_avg", "exp_avg_sq"} and "momentum_buffer" in moments
    return train_steps(groups, trainer, run, open_fake_loader(groups, trainer, run, STEPS))


def _named(kind: str, name: str) -> dict[str, Any]:
    return {"name": f"{kind}-{name}", "parallel.use_distributed_optimizer": KINDS[kind]}
