"""`--debug`: the first micro-batch as text, and shapes in the first forward pass; `--profile`: traces of iterations."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from llava_mcore.config.schema import RunConfig
from llava_mcore.config.sections.logs import parse_numbers, parse_span
from llava_mcore.log import warn_on_failure
from llava_mcore.parallel.batch import TensorFields
from llava_mcore.parallel.groups import Groups
from llava_mcore.training.setup import Trainer

logger = logging.getLogger(__name__)

FOLDER = "profile"
MEMORY_EVENTS = 200_000
"""Maximum number of allocations and frees in the memory snapshot; the newest are kept."""


class ShowFirst:
    """Wraps a loader and prints its first micro-batch.

    Args:
        in_words: turns a row of the batch into text: (input_ids [s], trained [s]) -> text.
    """

    def __init__(self, loader: Any, in_words: Callable[[Tensor, Tensor], str]) -> None:
        self.loader = loader
        self.in_words = in_words
        self.is_shown = False

    def __next__(self) -> Any:
        batch = next(self.loader)
        if not self.is_shown:
            self.is_shown = True
            logger.info("%s", describe(batch, self.in_words))
        return batch

    def state(self) -> Any:
        """Return the position in the data."""
        return self.loader.state()

    def read_again(self, state: Any, count: int) -> Any:
        """Return the micro-batches that followed an earlier state."""
        return self.loader.read_again(state, count)

    def close(self) -> None:
        """Stop the loader's processes."""
        self.loader.close()


def describe(batch: TensorFields, in_words: Callable[[Tensor, Tensor], str]) -> str:
    """Return the shapes of a micro-batch, and its first row as text and as numbers.

    A mark at position i means that the model is trained to predict token i, whose label is at i - 1.
    """
    tensors = {
        "input_ids": batch.input_ids,
        "labels": batch.labels,
        "loss_mask": batch.loss_mask,
        "cu_seqlens": batch.cu_seqlens,
        **batch.media,
    }
    lines = ["first micro-batch:", *(f"  {name:<17} {_shape(tensor)}" for name, tensor in tensors.items())]
    ids, trained = batch.input_ids[0], torch.roll(batch.loss_mask[0] > 0, 1)
    trained[0] = False
    wrong = trained & (torch.roll(batch.labels[0], 1) != ids)
    lines.append(
        f"  first row, {int(trained.sum())} of {len(ids)} tokens trained, {int(wrong.sum())} misplaced labels:"
    )
    lines += [f"    {line}" for line in in_words(ids, trained).splitlines()]
    return "\n".join(lines)


def show_shapes_once(trainer: Trainer) -> None:
    """Print the input and output shapes of every part of the model in each rank's first forward pass."""
    for index, model in enumerate(trainer.models):
        for name, part in model.named_children():
            label = name if len(trainer.models) == 1 else f"{name} (chunk {index})"
            hooks: list[Any] = []
            hook = functools.partial(_print_shapes, trainer.groups, label, hooks)
            hooks.append(part.register_forward_hook(hook, with_kwargs=True))


def _print_shapes(
    groups: Groups, name: str, hooks: list[Any], _part: torch.nn.Module, args: Any, kwargs: Any, output: Any
) -> None:
    hooks.pop().remove()
    inputs = [*args, *(value for value in kwargs.values() if isinstance(value, Tensor))]
    entered = ", ".join(_shape(value) for value in inputs if isinstance(value, Tensor)) or "the previous stage's output"
    of_context = f", context rank {groups.cp_rank}" if groups.cp_size > 1 else ""
    where = f"stage {groups.pp_rank}, tensor rank {groups.tp_rank}{of_context}"
    # All ranks of the first replica print, because each has its own shapes.
    if groups.dp_rank == 0:
        print(f"{where}: {name}: {entered} -> {_shapes(output)}", flush=True)


def _shapes(output: Any) -> str:
    values = output if isinstance(output, tuple | list) else [output]
    return ", ".join(_shape(value) for value in values if isinstance(value, Tensor))


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


class IterationProfiler:
    """Profiles some iterations of a run on some ranks. No method is a collective call."""

    def __init__(self, run: RunConfig, groups: Groups) -> None:
        ranks = parse_numbers(run.logging.profile_ranks)
        chosen = run.logging.profile is not None and (not ranks or groups.rank in ranks)
        self.span = parse_span(run.logging.profile) if chosen else range(0)
        self.rank, self.folder = groups.rank, run.run_dir / FOLDER
        self.on_gpu = groups.device.type == "cuda"
        self._profile: profile | None = None
        self._iterations: list[int] = []

    @contextlib.contextmanager
    def iteration(self, iteration: int) -> Iterator[None]:
        """Profile one iteration if it is in the span; the trace is written after the last one."""
        if iteration not in self.span:
            yield
            return
        if self._profile is None:
            self._begin()
        self._iterations.append(iteration)
        with record_function(f"iteration {iteration}"):
            yield
        if iteration == self.span[-1]:
            self.close()

    def close(self) -> None:
        """Write what has been profiled, even if the run ends within the span or by an error. A failure is a warning."""
        done, self._profile = self._profile, None
        if done is not None:
            done.stop()
            warn_on_failure("the profile was not written", lambda: self._write(done))

    def _write(self, done: profile) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        stem = f"rank_{self.rank:05d}.iterations_{self._iterations[0]}-{self._iterations[-1]}"
        written = [self.folder / f"{stem}.trace.json.gz"]
        done.export_chrome_trace(str(written[0]))
        if self.on_gpu:
            written.append(self._write_memory(self.folder / f"{stem}.memory.pickle"))
        self._iterations = []
        logger.info("profile written: %s", ", ".join(map(str, written)))

    def _begin(self) -> None:
        if self.on_gpu:
            # Writing C++ stacks as well takes more than a minute.
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=MEMORY_EVENTS)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        self._profile = profile(activities=activities, record_shapes=True)
        self._profile.start()

    def _write_memory(self, path: Path) -> Path:
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
        return path
