"""Answers during training inside a test world: real shards, a model with dropout."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from llava_mcore.checkpoint.layout import hf_folder, iteration_folder
from llava_mcore.inference.generation.questions import Questions
from llava_mcore.parallel.groups import Groups
from llava_mcore.processes.watchdog import Watchdog
from llava_mcore.training.answers.answerer import AnswerData, Answerer
from llava_mcore.training.answers.result import write_answers
from llava_mcore.training.fetch import SkipBudget, fetch_step
from llava_mcore.training.setup import Trainer
from llava_mcore.training.step import train_step
from tests.helpers.batches import FakeLoader
from tests.helpers.encoding import assets_once
from tests.parallel.checks import join
from tests.parallel.training_checks import GLOBAL_BATCH, make_trainer, run_config

ASKED = {
    "validation.eval_generate": 1,
    "validation.eval_generate_samples": 15,
    "validation.eval_generate_max_new_tokens": 6,
    "validation.eval_generate_batch_size": 3,
}
CHUNKED = {"parallel.num_layers_per_virtual_pipeline_stage": 1}
SPLIT = {"parallel.sequence_parallel": True}


def with_and_without(
    tp: int, pp: int, checkpoint: str, data: str, save_dir: str, more: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return what each way of training finds: answers before every step and after the last one, losses, weights.

    `more`: other keys of all runs.
    """
    groups = join(tp, pp)
    given = (groups, checkpoint, data, save_dir)
    more = more or {}
    found = {"with": train_and_ask(*given, ASKED | more), "without": train_and_ask(*given, more)}
    if pp > 1:
        found["interleaved"] = train_and_ask(*given, ASKED | CHUNKED, steps=0)
    if tp > 1:
        found["sequence parallel"] = train_and_ask(*given, ASKED | SPLIT, steps=0)
    return found


def train_and_ask(
    groups: Groups, checkpoint: str, data: str, save_dir: str, flags: dict[str, Any], steps: int = 2
) -> dict[str, Any]:
    """Ask, then train and ask in turns; train only, if the flags name no interval."""
    run = run_config(groups.tp_size, groups.pp_size, checkpoint, save_dir, **flags)
    trainer = make_trainer(groups, run)
    folder = hf_folder(iteration_folder(Path(checkpoint), 0))
    size, asks = run.training.micro_batch_size, run.validation.eval_generate is not None
    loader, asked = None, None
    if groups.loads_data:
        loader = FakeLoader(
            trainer.hf, micro_batch_size=size, dp_rank=groups.dp_rank, dp_size=groups.dp_size, text_only={1, 3}
        )
        if asks:
            assets = assets_once(folder)
            most = run.validation.eval_generate_samples
            asked = AnswerData(assets, Questions(data, assets, split="val", most_samples=most))
    watchdog = Watchdog(100, Path(save_dir), groups.rank)
    answerer = Answerer(trainer, asked, folder, watchdog)
    rounds, losses = [], []
    for iteration in range(steps + 1):
        if asks:
            result = answerer.run(iteration)
            rounds.append((result.metrics, result.records))
            if groups.rank == 0 and not iteration:
                write_answers(Path(save_dir), replace(result, iteration=groups.world_size))
        if iteration < steps:
            number = GLOBAL_BATCH // (size * groups.dp_size)
            batches, *_ = fetch_step(groups, loader, number, SkipBudget(0.0), trainer.fields)
            step = train_step(
                groups, trainer.chunks, trainer.optimizer, trainer.scheduler, batches, GLOBAL_BATCH
            ).result()
            losses.append((step.loss, step.grad_norm))
    watchdog.close()
    return {"rounds": rounds, "losses": losses, "weights": digest(trainer)}


def digest(trainer: Trainer) -> str:
    """Return a hash of this rank's weights."""
    found = hashlib.sha256()
    for model in trainer.models:
        for _, parameter in sorted(model.named_parameters()):
            found.update(parameter.detach().float().cpu().numpy().tobytes())
    return found.hexdigest()
