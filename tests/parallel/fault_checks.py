"""Runs with broken batches and background saves inside a test world."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import contextlib
import errno
import functools
import io
import logging
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

from llava_mcore.checkpoint import save_plan
from llava_mcore.checkpoint.complete import iterations
from llava_mcore.checkpoint.layout import latest_checkpoint, latest_iteration
from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import CheckpointError, FileError, TrainingError
from llava_mcore.log import warn_on_failure
from llava_mcore.media.batch_fields import PIXEL_VALUES
from llava_mcore.parallel.groups import Groups, gather_to_all
from llava_mcore.parallel.random import make_deterministic
from llava_mcore.parallel.share import share_step
from llava_mcore.parallel.together import raise_together
from llava_mcore.processes.watchdog import Watchdog
from llava_mcore.training.answers.answerer import Answerer
from llava_mcore.training.diagnostics import IterationProfiler
from llava_mcore.training.iterations import Iterations
from llava_mcore.training.logs.metrics_file import FILE, JsonLinesWriter
from llava_mcore.training.logs.reporter import Reporter, StartTimes
from llava_mcore.training.logs.sinks import Sinks
from llava_mcore.training.loop import StopRules, TrainingLoop
from llava_mcore.training.memory_snapshot import MemoryRecorder
from llava_mcore.training.saving.pending import Writing
from llava_mcore.training.saving.save import Saver
from llava_mcore.training.saving.state import LOADER_FOLDER, TrainingProgress, loader_file, resume
from llava_mcore.training.setup import Trainer
from llava_mcore.training.validation import Validator
from tests.helpers.batches import FakeBatch, FakeLoader, micro_batch
from tests.parallel.checks import join
from tests.parallel.training_checks import make_trainer, run_config

NOT_FINITE_AT = 3


class BrokenLoader(FakeLoader):
    """From data-parallel rank 1, the second micro-batch of iteration NOT_FINITE_AT has a pixel that is NaN."""

    def __next__(self) -> FakeBatch:
        batch = super().__next__()
        if self.rank == 1 and self.count == 2 * NOT_FINITE_AT:
            batch.media[PIXEL_VALUES][0, 0, 0, 0] = torch.nan
        return batch


def loop(groups: Groups, run: RunConfig, kind: type[FakeLoader], stop_after: int | None = None) -> Trainer:
    """Train as a worker does."""
    trainer, loader, progress = make_trainer(groups, run), None, TrainingProgress()
    if groups.loads_data:
        size = run.training.micro_batch_size
        loader = kind(trainer.hf, micro_batch_size=size, dp_rank=groups.dp_rank, dp_size=groups.dp_size, text_only={1})
    watchdog = Watchdog(120, run.run_dir, groups.rank)
    times = StartTimes()
    stop = StopRules(lambda: groups.rank == 1 and progress.iteration == stop_after, None)
    try:
        hf = Path(run.checkpoint.load or "") / "iter_0000000" / "hf"
        reporter = raise_together(groups, lambda: Reporter(trainer, progress, times))
        finished = TrainingLoop(
            trainer,
            progress,
            iterations=Iterations(trainer, loader, progress, reporter),
            reporter=reporter,
            saver=Saver(trainer, hf),
            validator=Validator(trainer, None, watchdog),
            answerer=Answerer(trainer, None, hf, watchdog),
            profiler=IterationProfiler(run, groups),
            memory=MemoryRecorder(trainer),
            stop=stop,
            watchdog=watchdog,
            times=times,
            dataset_names=(),
        ).run()
    finally:
        watchdog.close()
    assert finished == (stop_after is None)
    return trainer


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for model in trainer.models for name, p in model.named_parameters()}


def faults(checkpoint: str, save_dir: str) -> dict[str, Any]:
    """Stop at, skip over and leave out a step that is not finite; stop early; at dp 2."""
    make_deterministic()  # on GPUs, equal steps would otherwise differ by rounding
    groups = join(1, 1)
    found: dict[str, Any] = {}

    def run(name: str, iterations: int, **flags: Any) -> RunConfig:
        more: dict[str, Any] = {"name": name, "training.train_iters": iterations, "training.micro_batch_size": 2}
        more |= {"optimizer.lr_decay_style": "constant"}
        return run_config(1, 1, checkpoint, save_dir, **more, **{key.replace("__", "."): x for key, x in flags.items()})

    try:
        loop(groups, run("stop", 6, checkpoint__save=True, checkpoint__save_interval=1), BrokenLoader)
    except TrainingError as error:
        found["error"], found["on_all_ranks"] = str(error), error.on_all_ranks
    found["last before it"] = latest_iteration(Path(save_dir) / "stop")
    skip = loop(groups, run("skip", 6, faults__on_nan="skip"), BrokenLoader)
    skip_range = f"{NOT_FINITE_AT}-{NOT_FINITE_AT}"
    left_out = loop(groups, run("range", 6, faults__skip_train_iteration_range=skip_range), FakeLoader)
    found["equal"] = all(torch.equal(x, weights(left_out)[name]) for name, x in weights(skip).items())
    loop(groups, run("stopped", 6, checkpoint__save=True, checkpoint__save_optim=True), FakeLoader, stop_after=4)
    found["stopped at"] = latest_iteration(Path(save_dir) / "stopped")
    stopped = latest_checkpoint(Path(save_dir) / "stopped")[0]
    found["micro-batches before it"] = torch.load(
        stopped / LOADER_FOLDER / loader_file(groups.dp_rank), weights_only=True
    )
    try:
        loop(groups, run("diverging", 30, faults__on_nan="skip", optimizer__lr=1e30), FakeLoader)
    except TrainingError as error:
        found["diverging"] = str(error)
    with mock.patch.object(JsonLinesWriter, "write", full_at(3)), mock.patch.object(Sinks, "close", fails_to_close):
        try:
            loop(groups, run("full", 6), FakeLoader)
        except FileError as error:
            found["full"] = (str(error), error.on_all_ranks)
    found["metrics"] = {name: Path(save_dir, name, FILE).read_text() for name in ("stop", "skip", "range")}
    dist.barrier(groups.control)  # the other rank removes its file too
    found["stacks"] = [str(path) for path in Path(save_dir).glob("*/stacks/*")]
    return found


def full_at(iteration: int) -> Callable[[JsonLinesWriter, dict[str, Any]], None]:
    """Return what stands for JsonLines.write where the disk is full from an iteration on."""
    write = JsonLinesWriter.write

    def until_full(self: JsonLinesWriter, record: dict[str, Any]) -> None:
        if record["iteration"] >= iteration:
            raise OSError(errno.ENOSPC, "No space left on device", str(self.path))
        write(self, record)

    return until_full


def fails_to_close(self: Sinks) -> None:
    warn_on_failure("the plot", mock.Mock(side_effect=ValueError("half a line")))


def save_to_a_full_disk(
    groups: Groups,
    saver: Saver,
    iteration: int,
    *,
    full_on: int,
    num_bytes: int,
    persistent: bool = True,
    background: bool = True,
) -> str:
    """Return the error of a save of which one rank can only write the first bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if groups.rank == full_on:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        saver.save(TrainingProgress(iteration), None, background=background, persistent=persistent)
        saver.finish(iteration)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return ""


def fails_in_files_of(file_bytes: int, groups: Groups, saver: Saver, *, background: bool) -> tuple[int, str]:
    """Return how many files a rank would write, and the error of `save_to_a_full_disk` for files of this size."""
    write_item, num_bytes = filesystem_async._write_item, 1 << 18

    @functools.wraps(write_item)  # megatron-core looks at its arguments
    def write_not_into_the_first(*args: Any, **options: Any) -> Any:
        if any(str(x) == "__0_0.distcp" for x in args):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_item(*args, **options)

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(save_plan, "FILE_BYTES", file_bytes))
        if file_bytes < num_bytes:
            # megatron-core writes the last file first, in this thread, and only then starts those of the others.
            patches.enter_context(mock.patch.object(filesystem_async, "_write_item", write_not_into_the_first))
            num_bytes = 1 << 30
        message = save_to_a_full_disk(groups, saver, 10, full_on=0, num_bytes=num_bytes, background=background)
    strategy = saver._plan.strategy
    own = strategy.base_strategy if isinstance(strategy, FullyParallelSaveStrategyWrapper) else strategy
    return own.thread_count, message


def replaced_while_the_disk_is_slow(groups: Groups, saver: Saver) -> tuple[bool, bool]:
    """Save over the one checkpoint that is kept, on a disk that does not end deleting it before a third save.

    Returns whether training went on meanwhile, and whether nothing is left in the end.
    """
    run_dir, gate, delete = saver.trainer.run.run_dir, threading.Event(), shutil.rmtree

    def slowly(path: Path) -> None:
        assert gate.wait(60)
        delete(path)

    aside = run_dir / ".iter_0000007.deleted"
    with mock.patch.object(shutil, "rmtree", slowly):
        saver.save(TrainingProgress(8), None, background=True)
        saver.finish(8)
        went_on = groups.rank != 0 or (iterations(run_dir) == [8] and aside.is_dir())
        gate.set()
        saver.save(TrainingProgress(9), None, background=True)
        saver.finish(9)
    if groups.rank == 0:
        assert saver._deletion is not None
        saver._deletion.join()
    dist.barrier(groups.control)
    return went_on, iterations(run_dir) == [9] and not list(run_dir.glob(".iter*"))


ERRORS = (
    OSError("no room"),
    CheckpointError("no config.json"),
    RuntimeError("unexpected pos 64 vs 8"),
    NameError("a name that the program gets wrong"),
)


def problem_of(error: Exception) -> str | None:
    """Return what the main thread learns of an error in the thread that writes."""
    writing = Writing(mock.Mock(side_effect=error), Path("save/.iter.partial"))
    writing.start()
    try:
        return writing.problem()
    except NameError as raised:
        return str(raised)


def what_ranks_have_alike(groups: Groups, saver: Saver) -> tuple[str, list[float], list[float]]:
    """Return what a save says of a norm that has drifted, the mean of fractional loss masks, and all ranks' draws."""
    trainer = saver.trainer
    log = logging.StreamHandler(io.StringIO())
    logging.getLogger("llava_mcore").addHandler(log)
    saver._warn_of_drift(6)
    assert not log.stream.getvalue()
    parameter = trainer.models[0].get_parameter("language_model.decoder.final_layernorm.weight")
    before = parameter.data.clone()
    parameter.data[0] += 1e-3 * groups.tp_rank
    saver._warn_of_drift(6)
    parameter.data.copy_(before)
    logging.getLogger("llava_mcore").removeHandler(log)
    batch = micro_batch(trainer.hf, [0, 1], set()) if groups.loads_data else None
    if batch is not None:
        batch.loss_mask = torch.full_like(batch.loss_mask, 0.25)
    (shared,) = share_step(groups, None if batch is None else [batch], 1, trainer.fields)
    means = gather_to_all(groups, shared.loss_mask.mean().item())
    return gather_to_all(groups, log.stream.getvalue())[0], means, gather_to_all(groups, torch.rand(1).item())


def background_save(checkpoint: str, save_dir: str, tp: int) -> dict[str, Any]:
    """Save in the background while every weight and moment changes; then a save that cannot be written."""
    groups = join(tp, 1)
    saving = {"checkpoint.save": True, "checkpoint.save_optim": True, "checkpoint.load_optim": True}
    saving |= {"checkpoint.keep_last": 1}
    flags = saving | {"training.train_iters": 2, "parallel.use_distributed_optimizer": tp == 1}
    run = run_config(tp, 1, checkpoint, save_dir, **flags, name="async")
    trainer = loop(groups, run, FakeLoader)
    saver = Saver(trainer, Path(checkpoint) / "iter_0000000" / "hf")
    expected = weights(trainer)
    saver.save(TrainingProgress(7), {"place": 1} if groups.loads_data else None, background=True)
    during = (saver.pending, latest_iteration(run.run_dir))
    with torch.no_grad():
        for parameter in (p for model in trainer.models for p in model.parameters()):
            parameter.fill_(7.0)
        for state in (x for one in trainer.optimizer.chained_optimizers for x in one.optimizer.state.values()):
            state["exp_avg"].fill_(7.0)
    saver.finish(8)
    after = (saver.pending, latest_iteration(run.run_dir))
    alike = what_ranks_have_alike(groups, saver)
    fresh = make_trainer(groups, run)
    progress, saved = resume(fresh)
    states = None if saved is None else list(saved)  # the checkpoint is replaced below
    equal = all(torch.equal(x, expected[name]) for name, x in weights(fresh).items())
    moments = [x["exp_avg"] for one in fresh.optimizer.chained_optimizers for x in one.optimizer.state.values()]
    replaced = replaced_while_the_disk_is_slow(groups, saver)
    saved = [
        fails_in_files_of(file_bytes, groups, Saver(trainer, saver.hf_source), background=background)
        for file_bytes in (1 << 30, 1 << 19, 1 << 17)
        for background in (True, False)
    ]
    return {
        "alike": alike,
        "refused": [problem_of(error) for error in ERRORS],
        "replaced": replaced,
        "during": during,
        "after": after,
        "equal": equal,
        "moments": all(bool((x.abs() < 7).all()) for x in moments),
        "progress": progress.iteration,
        "loader": states,
        "failed": saved,
        "latest": latest_iteration(run.run_dir),
    }
