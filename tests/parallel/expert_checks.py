"""What the ranks of a world do with a model that has mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core import tensor_parallel
from megatron.core.extensions import transformer_engine
from megatron.core.transformer import transformer_config

from llava_mcore.checkpoint.layout import hf_folder, latest_checkpoint
from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import DataError
from llava_mcore.inference.generation.questions import Questions
from llava_mcore.models.language.experts import Experts
from llava_mcore.models.trainable import count_parameters
from llava_mcore.parallel.groups import Groups, sum_over_ranks
from llava_mcore.training import model_options
from llava_mcore.training.fetch import SkipBudget, fetch_step
from llava_mcore.training.saving.save import Saver, save_checkpoint
from llava_mcore.training.saving.state import TrainingProgress, resume
from llava_mcore.training.step import forward_backward, train_step
from tests.helpers.batches import DivisiblePacks
from tests.helpers.emulated_fp8 import emulated_fp8
from tests.parallel.answer_checks import ASKED, train_and_ask
from tests.parallel.checks import join, load_model, logits
from tests.parallel.resume_checks import STEPS, open_fake_loader, train_steps
from tests.parallel.training_checks import GLOBAL_BATCH, curve, make_trainer, run_config
from tests.parallel.validation_checks import train_and_validate

Layout = tuple[int, ...]
"""tp, pp, ep, etp, and cp if it is not 1."""
TEXT_ONLY = frozenset({1, 3})
"""Samples without images, as `open_fake_loader` has them."""


MICRO_BATCH = 2
ON_OWN_DISKS = {(2, 1, 2, 1), (2, 2, 2, 1)}
"""Layouts that also save on the nodes' own disks, in the background."""
IN_HALF_PRECISION = {(1, 1, 1, 1), (1, 1, 2, 1), (2, 1, 2, 1)}
IN_FP8 = {(1, 1, 1, 1), (2, 1, 2, 1)}
HALF: dict[str, Any] = {"training.precision": "fp16", "training.loss_scale": 128.0}
WITH_ADAPTERS: dict[Layout, tuple[str, ...]] = {
    (1, 1, 1, 1): ("experts", "dora"),
    (2, 1, 1, 2): ("experts",),
    (2, 1, 2, 1): ("experts", "dora"),
    (2, 2, 2, 1): ("experts",),
    (2, 1, 2, 2): ("experts",),
    (1, 1, 2, 1, 2): ("experts",),
}
"""Layouts that also train adapters, and their kinds: LoRA on experts and attention, DoRA on attention."""
WITH_ANSWERS: set[Layout] = {(1, 1, 1, 1), (1, 1, 2, 1), (1, 2, 2, 1), (2, 1, 2, 2), (1, 1, 2, 1, 2)}
"""Layouts that answer questions: one replica has all experts, or two share them, also over two stages."""
BRIEF: set[Layout] = {(2, 1, 2, 1, 2)}
"""Layouts whose validations and router terms are those of two others: with context parallelism, and without."""
COEFFICIENTS = {"aux_loss_coef": 0.2, "z_loss_coef": 0.05}
TERMS: dict[str, Any] = {f"router.{key}": value for key, value in COEFFICIENTS.items()}


def configure(groups: Groups, checkpoint: str, save_dir: str, **flags: Any) -> RunConfig:
    """Return a run of this world's layout, whose experts have an optimizer of their own if others divide them."""
    layout = {
        "parallel.expert_model_parallel_size": groups.ep_size,
        "parallel.expert_tensor_parallel_size": groups.etp_size,
        "parallel.context_parallel_size": groups.cp_size,
        "parallel.sequence_parallel": groups.tp_size > 1,
        "parallel.use_distributed_optimizer": True,
        "training.micro_batch_size": MICRO_BATCH,
        "training.train_iters": 6,
        "checkpoint.save": True,
        "checkpoint.save_optim": True,
        "optimizer.projection_lr": 2e-3,
    }
    return run_config(groups.tp_size, groups.pp_size, checkpoint, save_dir, **(layout | flags))


def gradient_error(groups: Groups, checkpoint: str, gradients: str, save_dir: str) -> float:
    """Return the largest difference to Hugging Face's gradients, relative to the largest value of each parameter.

    `gradients`: a checkpoint that has them in place of weights.
    """
    run = configure(groups, checkpoint, save_dir, **{"parallel.use_distributed_optimizer": False} | TERMS)
    trainer = make_trainer(groups, run)
    loader = open_fake_loader(groups, trainer, run, 0)
    number = GLOBAL_BATCH // (run.training.micro_batch_size * groups.dp_size)
    batches, *_ = fetch_step(groups, loader, number, SkipBudget(0.0), trainer.fields)
    for chunk in trainer.chunks:
        chunk.zero_grad_buffer()
    forward_backward(trainer.chunks, batches)
    expected = load_model(groups, latest_checkpoint(Path(gradients))[0], sequence_parallel=groups.tp_size > 1)
    errors = []
    for p, q in zip(trainer.models[0].parameters(), expected.parameters(), strict=True):
        errors.append(float((vars(p)["main_grad"] - q).abs().max() / q.abs().max().clamp(min=1e-6)))
    return max(errors)


def one_layout(
    layout: Layout,
    checkpoint: str,
    gradients: str,
    inputs: dict[str, torch.Tensor],
    data: list[str],
    save_dir: str,
    source: str | None,
) -> dict[str, Any]:
    """Compute everything that is compared of one layout.

    Args:
        data: datasets with few validation samples.
        source: a run of another layout, to resume.
    """
    groups = join(*layout)
    model = load_model(groups, latest_checkpoint(Path(checkpoint))[0])
    found: dict[str, Any] = {"logits": logits(groups, model, inputs)}
    found["gradients"] = gradient_error(groups, checkpoint, gradients, save_dir)
    again = configure(groups, checkpoint, save_dir, **{"model.recompute": "selective"})
    with counted_products() as products:
        found["packed"] = curve(groups, again, TEXT_ONLY, DivisiblePacks, most_steps=2)
    found["products"] = products
    if layout not in BRIEF:
        found["validations"] = [validated(groups, checkpoint, folder, save_dir) for folder in data]
        found["with terms"] = trained_with_terms(groups, checkpoint, save_dir)
    if layout in WITH_ANSWERS:
        found["answers"] = answered(groups, checkpoint, data[-1], save_dir)
    if groups.pp_size > 1:
        chunks = {"parallel.num_layers_per_virtual_pipeline_stage": 1, "training.micro_batch_size": 1}
        interleaved = configure(groups, checkpoint, save_dir, **chunks)
        found["interleaved"] = curve(groups, interleaved, TEXT_ONLY, most_steps=2)
    if layout in WITH_ADAPTERS:
        found["adapters"] = {
            kind: trained_adapter(groups, checkpoint, save_dir, kind) for kind in WITH_ADAPTERS[layout]
        }
    if layout in IN_HALF_PRECISION:
        half = configure(groups, checkpoint, save_dir, **HALF)
        found["fp16"] = curve(groups, half, TEXT_ONLY, most_steps=3)
    if layout in IN_FP8:
        found["fp8"] = losses_in_fp8(groups, checkpoint, save_dir)
    if layout in ON_OWN_DISKS:
        found["own disk"] = saved_on_own_disk(groups, checkpoint, save_dir)
    # Saved after some steps; what follows is the same when it is resumed.
    run = configure(groups, checkpoint, save_dir, name="-".join(map(str, layout)))
    trainer = make_trainer(groups, run)
    own = count_parameters(trainer.models, first_tp_rank=groups.tp_rank == 0)
    found["parameters"] = sum_over_ranks(groups, own if groups.data_parallel.rank() == 0 else [0] * len(own))
    loader = open_fake_loader(groups, trainer, run, 0)
    begun = train_steps(groups, trainer, run, loader)
    state = None if loader is None else loader.state()
    save_checkpoint(trainer, TrainingProgress(STEPS, STEPS * GLOBAL_BATCH), Path(checkpoint).parent / "hf", state)
    found["losses"] = begun + train_steps(groups, trainer, run, loader)
    found["resumed"] = resumed(groups, checkpoint, save_dir, run.name)
    if source is not None:
        found["resumed elsewhere"] = resumed(groups, checkpoint, save_dir, source)
    return found


@contextmanager
def counted_products() -> Iterator[list[bool]]:
    """Collect for every forward pass of experts whether it keeps what a backward pass needs."""
    calls: list[bool] = []
    products = Experts._mlp

    def counted(experts: Experts, *inputs: torch.Tensor) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return products(experts, *inputs)

    with mock.patch.object(Experts, "_mlp", counted):
        yield calls


def losses_in_bf16(layout: Layout, checkpoint: str, save_dir: str) -> dict[str, list[float]]:
    """Return the losses of a few steps in fp32, and in bf16 with either implementation of layers."""
    groups = join(*layout)
    flags: dict[str, dict[str, Any]] = {"fp32": {}}
    flags |= {
        impl: {"training.precision": "bf16", "model.transformer_impl": impl} for impl in ("local", "transformer_engine")
    }
    return {
        name: curve(groups, configure(groups, checkpoint, save_dir, **more), TEXT_ONLY, most_steps=4)["loss"]
        for name, more in flags.items()
    }


def losses_in_fp8(groups: Groups, checkpoint: str, save_dir: str) -> dict[str, list[float]]:
    """Return the losses of a few steps in bf16, and with experts that multiply in FP8 too, also where they are computed
    again. Other layers are megatron-core's own, in bf16."""
    flags: dict[str, dict[str, Any]] = {"bf16": {}, "fp8": {"training.fp8": True, "training.fp8_recipe": "tensorwise"}}
    flags["recomputed"] = flags["fp8"] | {"model.recompute": "selective"}
    with (
        emulated_fp8(),
        mock.patch.object(model_options, "transformer_impl", lambda *_: "local"),
        mock.patch.object(transformer_config, "is_te_min_version", lambda *_: True),
        mock.patch.object(transformer_engine, "te_checkpoint", recomputed),
    ):
        return {
            name: curve(
                groups,
                configure(groups, checkpoint, save_dir, **more | {"training.precision": "bf16"}),
                TEXT_ONLY,
                most_steps=4,
            )["loss"]
            for name, more in flags.items()
        }


def recomputed(forward: Any, distributes: bool, _tracker: Any, _group: Any, *inputs: Any, **more: Any) -> Any:
    """Stand for Transformer Engine's function for layers in FP8."""
    return tensor_parallel.checkpoint(partial(forward, **more), distributes, *inputs)


def trained_with_terms(groups: Groups, checkpoint: str, save_dir: str) -> dict[str, list[Any]]:
    """Return loss and what routers report in a few steps, with whole layers computed again."""
    run = configure(groups, checkpoint, save_dir, **{"model.recompute": "full", "optimizer.lr": 1e-2} | TERMS)
    trainer = make_trainer(groups, run)
    loader = open_fake_loader(groups, trainer, run, 0)
    found: dict[str, list[Any]] = {}
    for _ in range(2):
        number = GLOBAL_BATCH // (MICRO_BATCH * groups.dp_size)
        batches, *_ = fetch_step(groups, loader, number, SkipBudget(0.0), trainer.fields)
        chunks, optimizer = trainer.chunks, trainer.optimizer
        step = train_step(groups, chunks, optimizer, trainer.scheduler, batches, GLOBAL_BATCH, loads=trainer.loads)
        result = step.result()
        found.setdefault("tokens", []).append([sum(layer) for layer in result.loads])
        found.setdefault("loss", []).append(result.loss)
        for name, (total, count) in result.sums.items():
            found.setdefault(name, []).append(total / count)
    return found


def validated(groups: Groups, checkpoint: str, data: str, save_dir: str) -> list[Any]:
    """Return loss and counts of a validation, of which some replicas have fewer micro-batches than others, or none."""
    flags: dict[str, Any] = {"data.path": data, "data.num_workers": 0, "data.seq_length": 128}
    flags |= {"validation.eval_interval": 1, "parallel.sequence_parallel": groups.tp_size > 1}
    flags |= {"training.micro_batch_size": 1, "parallel.context_parallel_size": groups.cp_size}
    return train_and_validate(groups, checkpoint, save_dir, flags, 0)["validations"]


def answered(groups: Groups, checkpoint: str, data: str, save_dir: str) -> tuple[list[Any], str]:
    """Return the answers to questions of the validation split, of which replicas have different numbers, and what is
    said if the last replica cannot read its second one."""
    flags = ASKED | {"parallel.sequence_parallel": groups.tp_size > 1, "parallel.use_distributed_optimizer": True}
    flags |= {"parallel.context_parallel_size": groups.cp_size}
    flags |= {"parallel.expert_model_parallel_size": groups.ep_size}
    flags |= {"parallel.expert_tensor_parallel_size": groups.etp_size}
    found = train_and_ask(groups, checkpoint, data, save_dir, flags, steps=0)
    read = Questions.read

    def broken(questions: Questions, indices: Sequence[int]) -> Iterator[Any]:
        first, *_ = read(questions, indices)
        yield first
        raise DataError("the shard is gone")

    said = ""
    is_last = groups.dp_rank == groups.dp_size - 1
    with mock.patch.object(Questions, "read", broken if is_last else read):
        try:
            train_and_ask(groups, checkpoint, data, save_dir, flags, steps=0)
        except DataError as error:
            said = str(error)
    return found["rounds"], said


def resumed(groups: Groups, checkpoint: str, save_dir: str, name: str, **flags: Any) -> list[float]:
    """Return the losses of a resumed run."""
    run = configure(groups, checkpoint, save_dir, **flags | {"name": name, "checkpoint.load_optim": True})
    trainer = make_trainer(groups, run)
    progress, _ = resume(trainer)
    assert progress.iteration == STEPS
    return train_steps(groups, trainer, run, open_fake_loader(groups, trainer, run, STEPS))


def trained_adapter(groups: Groups, checkpoint: str, save_dir: str, kind: str) -> tuple[list[float], list[float]]:
    """Return the losses of a run of adapters that saves after some steps, and those after resuming it."""
    flags: dict[str, Any] = {"adapter.r": 4, "adapter.vision_r": 2, "adapter.dora": kind == "dora"}
    flags |= {"adapter.expert_r": 2} if kind == "experts" else {}
    flags |= {"model.freeze_vision_model": True, "optimizer.projection_lr": None}
    sizes = groups.tp_size, groups.pp_size, groups.ep_size, groups.etp_size, groups.cp_size
    layout = "-".join(map(str, sizes))
    run = configure(groups, checkpoint, save_dir, name=f"{kind}-{layout}", **flags)
    trainer = make_trainer(groups, run)
    loader = open_fake_loader(groups, trainer, run, 0)
    begun = train_steps(groups, trainer, run, loader)
    state = None if loader is None else loader.state()
    companions = hf_folder(latest_checkpoint(Path(checkpoint))[0])
    save_checkpoint(trainer, TrainingProgress(STEPS, STEPS * GLOBAL_BATCH), companions, state)
    losses = begun + train_steps(groups, trainer, run, loader)
    return losses, resumed(groups, checkpoint, save_dir, run.name, **flags)


def saved_on_own_disk(groups: Groups, checkpoint: str, save_dir: str) -> tuple[list[float], list[float]]:
    """Return the losses after a save in the background on this node's disk, and those after resuming it."""
    flags: dict[str, Any] = {"checkpoint.non_persistent_save_interval": 1}
    flags["checkpoint.non_persistent_local_dir"] = f"{save_dir}/disk"
    run = configure(groups, checkpoint, save_dir, name=f"own-disk-{groups.pp_size}", **flags)
    trainer = make_trainer(groups, run)
    loader = open_fake_loader(groups, trainer, run, 0)
    train_steps(groups, trainer, run, loader)
    saver, progress = Saver(trainer, Path(checkpoint).parent / "hf"), TrainingProgress(STEPS, STEPS * GLOBAL_BATCH)
    state = None if loader is None else loader.state()
    saver.save(progress, state, background=True, persistent=False)
    uninterrupted = train_steps(groups, trainer, run, loader)
    saver.finish(STEPS)
    return uninterrupted, resumed(groups, checkpoint, save_dir, run.name, **flags)
