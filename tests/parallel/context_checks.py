"""Context parallelism inside a test world: ranks that divide the tokens of every sample."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llava_mcore.config.schema import RunConfig
from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.loader.train_loader import TrainLoader
from llava_mcore.parallel.groups import Groups, context_parallel_levels
from llava_mcore.training.fetch import SkipBudget, fetch_step
from llava_mcore.training.saving.save import save_checkpoint
from llava_mcore.training.saving.state import TrainingProgress, resume
from llava_mcore.training.setup import Trainer
from llava_mcore.training.step import train_step
from tests.helpers.batches import LENGTH, FakeBatch, FakeLoader
from tests.helpers.encoding import assets_once
from tests.parallel.answer_checks import ASKED, train_and_ask
from tests.parallel.checks import join
from tests.parallel.gradient_checks import step_gradients
from tests.parallel.training_checks import GLOBAL_BATCH, MIXED, curve, make_trainer, run_config
from tests.parallel.validation_checks import train_and_validate

Layout = tuple[int, int, int]
"""tp, cp, pp."""
MULTIPLE, SAMPLE_MULTIPLE = 32, 8
"""Lengths of packs and of samples that every layout can divide: 8 * tp * cp and 2 * cp for four ranks."""
ROUNDED = {"multiple": MULTIPLE, "sample_multiple": SAMPLE_MULTIPLE}
PACKED, PADDED, DIVIDED, REPEATED = "packed", "padded", "packed, images divided", "packed, all images on each rank"
TOWERS = {DIVIDED: "on", REPEATED: "off"}


def configure(layout: Layout, checkpoint: str, save_dir: str, **flags: Any) -> RunConfig:
    """Return a run of this layout, with sequence parallelism where it is tensor-parallel."""
    tp, cp, pp = layout
    of_layout = {
        "parallel.context_parallel_size": cp,
        "parallel.sequence_parallel": tp > 1,
        "training.micro_batch_size": 1,
        "data.seq_length": 512,
    }
    return run_config(tp, pp, checkpoint, save_dir, **(of_layout | flags))


def gradients(
    layout: Layout, cases: dict[str, dict[str, Any]], save_dir: str, kinds: Sequence[str] = (PACKED, PADDED)
) -> dict[str, Any]:
    """Return where this rank is, and losses, gradients and their norm after the backward passes of a step of each case,
    packed and padded.

    A step has a micro-batch of all conversations, one of a single image and one of text alone.
    """
    tp, cp, pp = layout
    groups = join(tp, pp, cp=cp, a2a=2 if cp == 4 else None)
    found: dict[str, Any] = {"tp_rank": groups.tp_rank, "cp_rank": groups.cp_rank, "pp_rank": groups.pp_rank}
    if cp == 4:
        found["levels"] = [dist.get_process_group_ranks(x) for x in context_parallel_levels()]
    for name, case in cases.items():
        flags = {"training.global_batch_size": 3, **case.get("flags", {})}
        for kind in kinds:
            more = {"parallel.vision_data_parallel": TOWERS[kind]} if kind in TOWERS else {}
            run = configure(layout, case["checkpoint"], save_dir, **flags, **more)
            found[name, kind] = step_gradients(groups, run, case, packed=kind != PADDED, **ROUNDED)
    return found


class WholeSamples(FakeLoader):
    """The samples of FakeLoader, whose lengths every layout divides, one after the other in a single row."""

    def __next__(self) -> FakeBatch:
        batch = super().__next__()
        batch.cu_seqlens = torch.arange(0, batch.input_ids.numel() + 1, LENGTH, dtype=torch.int32)
        for name in ("input_ids", "labels", "loss_mask", "position_ids"):
            setattr(batch, name, getattr(batch, name).reshape(1, -1))
        return batch


LORA = {"model.freeze_vision_model": True, "adapter.r": 4, "adapter.vision_r": 2, "adapter.projection_r": 3}
RECOMPUTED = {"model.recompute": "full", "model.recompute_vision": "full"}
CURVES: dict[str, dict[str, Any]] = {
    "plain": {},
    "distributed": {"parallel.use_distributed_optimizer": True},
    "recomputed": RECOMPUTED,
    "stage 1": {"model.freeze_language_model": True, "model.freeze_vision_model": True},
    "adapters": LORA,
    "DoRA": LORA | {"adapter.dora": True},
    "bf16": {"training.precision": "bf16"},
}
"""Options of short runs, by name."""


def curves(layout: Layout, cases: dict[str, dict[str, Any]], data: str, save_dir: str) -> dict[str, Any]:
    """Train a few steps with each of the options on packs, and padded without any; interleaved with a pipeline. See
    `measured`, too.

    Args:
        data: a dataset with a validation split.
    """
    tp, cp, pp = layout
    groups = join(tp, pp, cp=cp)
    found = {}
    interleaved = {"parallel.num_layers_per_virtual_pipeline_stage": 1} if pp > 1 else {}
    for name, flags in (CURVES | {"padded": {}, "interleaved": interleaved}).items():
        given = {"training.train_iters": 3, "training.micro_batch_size": 2, **flags}
        run = configure(layout, cases["llava"]["checkpoint"], save_dir, **given)
        kind = FakeLoader if name == "padded" else WholeSamples
        found[name] = curve(groups, run, MIXED, kind)
    return {"curves": found, "measured": measured(groups, cases, data, save_dir)}


MEASURED = ("llava", "qwen2_5_vl", "qwen3_5")
"""Cases that are validated and asked: positions along one axis and three, and delta nets."""


def measured(groups: Groups, cases: dict[str, dict[str, Any]], data: str, save_dir: str) -> dict[str, Any]:
    """Return what validations find on padded and packed samples, and answers, of models before any training."""
    found = {}
    for name in MEASURED:
        flags: dict[str, Any] = {
            "parallel.context_parallel_size": groups.cp_size,
            "parallel.sequence_parallel": groups.tp_size > 1,
            "training.micro_batch_size": 2,
            "data.path": data,
            "data.num_workers": 0,
            "data.seq_length": 192,
        }
        packed = {"data.packing": True, "data.packing_buffer_size": 6, "data.sample_multiple": SAMPLE_MULTIPLE}
        given = (groups, cases[name]["checkpoint"])
        for kind, more in ((PADDED, {}), (PACKED, packed)):
            validated = train_and_validate(*given, save_dir, flags | more | {"validation.eval_interval": 1}, 0)
            found[name, kind] = validated["validations"][0]
        found[name, "answers"] = train_and_ask(*given, data, save_dir, flags | ASKED, steps=0)["rounds"][0][1]
    return found


SAVED_AFTER, MORE_STEPS = 2, 2


def stop_and_resume(layout: Layout, case: dict[str, Any], save_dir: str) -> dict[str, Any]:
    """Train and save on the way; a new trainer continues from the checkpoint, too.

    Returns losses and gradient norms of both, and the parameters that differ after them.
    """
    groups, run = _resumable(layout, case, save_dir)
    first, loader = make_trainer(groups, run), open_data(groups, case)
    begun = train_steps(groups, first, loader, SAVED_AFTER)
    state = None if loader is None else loader.state()
    save_checkpoint(first, TrainingProgress(SAVED_AFTER, SAVED_AFTER * GLOBAL_BATCH), Path(case["hf"]), state)
    uninterrupted = train_steps(groups, first, loader, MORE_STEPS)
    second, later = _resumed(groups, run, case)
    weights, others = ({n: p for m in x.models for n, p in m.named_parameters()} for x in (first, second))
    different = [name for name, p in weights.items() if not torch.equal(p, others[name])]
    expected, found = ({key: begun[key] + x[key] for key in begun} for x in (uninterrupted, later))
    return {"expected": expected, "found": found, "different": different}


def resume_elsewhere(layout: Layout, case: dict[str, Any], save_dir: str) -> dict[str, list[float]]:
    """Return what follows what `stop_and_resume` has saved, at another layout."""
    groups, run = _resumable(layout, case, save_dir)
    return _resumed(groups, run, case)[1]


def _resumable(layout: Layout, case: dict[str, Any], save_dir: str) -> tuple[Groups, RunConfig]:
    tp, cp, pp = layout
    flags = {
        "checkpoint.save": True,
        "checkpoint.save_optim": True,
        "checkpoint.load_optim": True,
        "parallel.use_distributed_optimizer": True,
    }
    return join(tp, pp, cp=cp), configure(layout, case["checkpoint"], save_dir, **flags)


def _resumed(groups: Groups, run: RunConfig, case: dict[str, Any]) -> tuple[Trainer, dict[str, list[float]]]:
    trainer = make_trainer(groups, run)
    progress, states = resume(trainer)
    assert progress.iteration == SAVED_AFTER
    return trainer, train_steps(groups, trainer, open_data(groups, case, saved=states), MORE_STEPS)


def open_data(groups: Groups, case: dict[str, Any], *, saved: Any = None) -> TrainLoader | None:
    """Return the loader of a case's shards on ranks that load data. `saved`: the states that it continues from."""
    if not groups.loads_data:
        return None
    config = DataConfig(
        path=Path(case["data"]),
        seq_length=192,
        num_workers=0,
        num_streams=2,
        packing=True,
        packing_buffer_size=6,
        sample_multiple=SAMPLE_MULTIPLE,
    )
    where = {"dp_rank": groups.dp_rank, "dp_size": groups.dp_size, "pad_multiple": MULTIPLE}
    return TrainLoader(config, assets_once(Path(case["hf"])), micro_batch_size=1, seed=3, saved=saved, **where)


def train_steps(groups: Groups, trainer: Trainer, loader: TrainLoader | None, number: int) -> dict[str, list[float]]:
    """Train so many steps; return losses, gradient norms and numbers of tokens."""
    found: dict[str, list[float]] = {"loss": [], "grad_norm": [], "tokens": []}
    for _ in range(number):
        batches, counts, *_ = fetch_step(
            groups, loader, GLOBAL_BATCH // groups.dp_size, SkipBudget(0.0), trainer.fields
        )
        step = train_step(groups, trainer.chunks, trainer.optimizer, trainer.scheduler, batches, GLOBAL_BATCH)
        result = step.result()
        found["loss"].append(result.loss)
        found["grad_norm"].append(result.grad_norm)
        found["tokens"].append(counts.num_tokens)
    return found
