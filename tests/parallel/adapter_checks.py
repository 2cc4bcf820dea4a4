"""Runs with adapters inside a test world."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from llava_mcore.adapters.lora import LinearAdapter
from llava_mcore.config.schema import RunConfig
from llava_mcore.convert.logits_worker import forward
from llava_mcore.parallel.groups import Groups
from llava_mcore.training.saving.save import save_checkpoint
from llava_mcore.training.saving.state import TrainingProgress, resume
from llava_mcore.training.setup import Trainer
from tests.helpers.fixed_dropout import RATE, fixed_here
from tests.parallel.checks import join
from tests.parallel.resume_checks import STEPS, open_fake_loader, train_steps
from tests.parallel.training_checks import GLOBAL_BATCH, MIXED, TrainingRun, make_trainer, run_all, run_config


def adapter_flags(tp: int, dp: int, folder: str | None = None) -> dict[str, Any]:
    """Return what every run with an adapter is given: all kinds of parallelism that the layout allows."""
    loaded = {} if folder is None else {"adapter.load": folder}
    return loaded | {
        "model.freeze_vision_model": True,
        "parallel.sequence_parallel": tp > 1,
        "parallel.use_distributed_optimizer": dp > 1,
    }


def curves(
    tp: int,
    pp: int,
    dp: int,
    checkpoint: str,
    wide: dict[str, Any],
    adapters: dict[str, str],
    dropped: dict[str, str],
    classes: dict[str, str],
    save_dir: str,
    num_steps: int,
) -> dict[str, Any]:
    """Train every adapter; a few steps of one packed, recomputed and so on, and of other classes.

    Args:
        wide: a checkpoint whose rows are several blocks of 64 numbers on each of two ranks, an adapter on it, and
            inputs whose logits are returned.
        dropped: adapters with dropout.
        num_steps: steps of `adapters` and `wide`, of a schedule of 20.
    """
    short = {"training.train_iters": 3}
    runs = {name: TrainingRun(checkpoint, MIXED, adapter_flags(tp, dp, folder)) for name, folder in adapters.items()}
    some = adapter_flags(tp, dp, adapters["lora"]) | short
    recomputed = {"model.recompute": "full", "model.recompute_vision": "full"}
    interleaved = {"parallel.num_layers_per_virtual_pipeline_stage": 1}
    runs |= {
        "packed": TrainingRun(checkpoint, MIXED, some, packed=True),
        "recomputed": TrainingRun(checkpoint, MIXED, some | recomputed),
        "images only": TrainingRun(checkpoint, (), some),
        "bf16": TrainingRun(checkpoint, MIXED, some | {"training.precision": "bf16"}),
    }
    if pp > 1:
        runs["interleaved"] = TrainingRun(checkpoint, MIXED, some | interleaved)
    quantized = adapter_flags(tp, dp, wide["adapter"]) | {"adapter.quantize": "nf4"}
    runs["nf4"] = TrainingRun(wide["checkpoint"], MIXED, quantized)
    everywhere = {"adapter.r": 4, "adapter.vision_r": 2, "adapter.projection_r": 3, "adapter.dora": True}
    for name, other in classes.items():
        flags = adapter_flags(tp, dp) | short | everywhere | {"adapter.bias": "lora_only"}
        runs[name] = TrainingRun(other, MIXED, flags)
    groups = join(tp, pp)
    found = run_all(groups, runs, save_dir, num_steps)
    with_masks = {
        name: TrainingRun(checkpoint, MIXED, adapter_flags(tp, dp, folder) | short) for name, folder in dropped.items()
    }
    with fixed_here():
        found |= run_all(groups, with_masks, save_dir)
    run = run_config(tp, pp, wide["checkpoint"], save_dir, **quantized)
    return {
        "curves": found,
        "logits": forward(make_trainer(groups, run).models[0].eval(), wide["inputs"]),
        "masks": drawn_masks(groups, checkpoint, dropped, save_dir) if tp > 1 else {},
    }


def drawn_masks(groups: Groups, checkpoint: str, dropped: dict[str, str], save_dir: str) -> dict[str, dict[str, bool]]:
    """Return for each kind of layer, adapter and sequence parallelism whether tensor-parallel ranks draw the same mask.

    The numbers that are kept are checked here.
    """
    found: dict[str, dict[str, bool]] = {}
    draw = LinearAdapter._dropped
    for name, folder in dropped.items():
        for sequence_parallel in (False, True):
            seen: dict[str, list[Tensor]] = {}

            def watched(adapter: LinearAdapter, x: Tensor, member: int, seen: Any = seen) -> Tensor:
                y = draw(adapter, x, member)
                assert torch.all((y == 0) | torch.isclose(y, x / (1 - RATE)))
                if adapter.linear.name.startswith("language_model"):
                    assert 0.5 * RATE < (y == 0).float().mean() < 2 * RATE
                    kind = "row" if adapter.division.is_row_parallel else "column"
                    seen.setdefault(kind, []).append(y == 0)
                return y

            flags = adapter_flags(groups.tp_size, 1, folder) | {
                "parallel.sequence_parallel": sequence_parallel,
                "training.train_iters": 1,
                "training.micro_batch_size": GLOBAL_BATCH,
            }
            with patch.object(LinearAdapter, "_dropped", watched):
                run_all(groups, {"": TrainingRun(checkpoint, {1, 3}, flags)}, save_dir)
            end = ", sequence parallel" if sequence_parallel else ""
            found[name + end] = {kind: _equal(masks, groups) for kind, masks in sorted(seen.items())}
    return found


def _equal(masks: list[Tensor], groups: Groups) -> bool:
    """Return whether all ranks have these masks; the first two, of two members or layers, must differ."""
    assert not torch.equal(masks[0], masks[1])
    values = torch.cat([x.flatten() for x in masks]).to(torch.uint8)
    ranks = [torch.empty_like(values) for _ in range(groups.tp_size)]
    torch.distributed.all_gather(ranks, values, group=groups.tensor_parallel)
    same = {torch.equal(x, ranks[0]) for x in ranks[1:]}
    assert len(same) <= 1
    return False not in same


def _start(groups: Groups, run: RunConfig) -> tuple[Trainer, Any]:
    trainer = make_trainer(groups, run)
    return trainer, open_fake_loader(groups, trainer, run, 0)


def _resumable(groups: Groups, checkpoint: str, save_dir: str, **flags: Any) -> RunConfig:
    given = {
        **adapter_flags(groups.tp_size, 2),
        "name": "adapter",
        "adapter.r": 4,
        "adapter.vision_r": 2,
        "adapter.dora": True,
        "adapter.targets": "q_proj,v_proj,down_proj,fc1",
        "adapter.modules_to_save": "multi_modal_projector,layers.2.self_attn.o_proj",
        "checkpoint.save": True,
        "checkpoint.save_optim": True,
        **flags,
    }
    return run_config(groups.tp_size, groups.pp_size, checkpoint, save_dir, **given)


SEVERAL: dict[str, Any] = {
    "name": "several",
    "adapter.dora": False,
    "adapter.bias": "all",
    "adapter.targets": "q_proj,down_proj,fc1",
    "adapter.modules_to_save": (),
}
"""The flags of a run that trains one adapter beside another one."""


def save_and_resume(tp: int, pp: int, checkpoint: str, save_dir: str, hf: str, frozen: str) -> dict[str, Any]:
    """Train, save, train on; then resume in new objects and train the same steps. Also save a run of two adapters.

    Args:
        frozen: PEFT folder of the second one.
    """
    groups = join(tp, pp)
    run = _resumable(groups, checkpoint, save_dir)
    trainer, loader = _start(groups, run)
    train_steps(groups, trainer, run, loader)
    state = None if loader is None else loader.state()
    save_checkpoint(trainer, TrainingProgress(STEPS, STEPS * GLOBAL_BATCH), Path(hf), state)
    expected = train_steps(groups, trainer, run, loader)
    several = _resumable(groups, checkpoint, save_dir, **SEVERAL, **{"adapter.frozen": frozen})
    other, loader = _start(groups, several)
    train_steps(groups, other, several, loader)
    save_checkpoint(other, TrainingProgress(STEPS, STEPS * GLOBAL_BATCH), Path(hf), state)
    trained = sum(p.numel() for model in trainer.models for p in model.parameters() if p.requires_grad)
    buffers = sum(x.param_data.numel() if x.param_data is not None else x.grad_data.numel()
                  for chunk in trainer.chunks for x in chunk.buffers)  # fmt: skip
    return {"expected": expected, "resumed": resumed(groups, checkpoint, save_dir), "sizes": (trained, buffers)}


def resumed(groups: Groups, checkpoint: str, save_dir: str) -> list[float]:
    """Resume what was saved, in several chunks per stage if there are stages; return the losses of the next steps."""
    chunks = {"parallel.num_layers_per_virtual_pipeline_stage": 1} if groups.pp_size > 1 else {}
    run = _resumable(groups, checkpoint, save_dir, **{"checkpoint.load_optim": True}, **chunks)
    trainer = make_trainer(groups, run)
    progress, _ = resume(trainer)
    assert progress.iteration == STEPS
    losses = train_steps(groups, trainer, run, open_fake_loader(groups, trainer, run, STEPS))
    torch.distributed.barrier()
    return losses


def resume_elsewhere(tp: int, pp: int, checkpoint: str, save_dir: str) -> list[float]:
    """As `resumed`, in a world of its own."""
    return resumed(join(tp, pp), checkpoint, save_dir)


def load_and_save(
    tp: int, pp: int, checkpoint: str, save_dir: str, hf: str, adapters: dict[str, str], inputs: dict[str, Tensor]
) -> dict[str, Tensor | None]:
    """Load PEFT folders, one for each run, save what was loaded, and return the logits of each."""
    groups, found = join(tp, pp), {}
    for name, folder in adapters.items():
        flags = {"name": name, "adapter.load": folder, "checkpoint.save": True}
        trainer = make_trainer(groups, run_config(tp, pp, checkpoint, save_dir, **flags))
        found[name] = forward(trainer.models[0].eval(), inputs)
        save_checkpoint(trainer, TrainingProgress(0, 0), Path(hf), None)
    return found
