"""`--memory-snapshot`: torch's snapshot of a GPU's memory in one iteration, with an image. Also writes one when memory
runs out."""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor
from torch.distributed.tensor import DTensor

from llava_mcore.config.sections.logs import parse_numbers
from llava_mcore.log import warn_on_failure
from llava_mcore.training.logs.memory_image import draw
from llava_mcore.training.logs.memory_timeline import Owned, summary, timeline_of
from llava_mcore.training.optimization.common_state import chained
from llava_mcore.training.setup import Trainer

logger = logging.getLogger(__name__)

FOLDER = "memory"
MAX_EVENTS = 200_000
"""Maximum number of allocations and frees in a snapshot; the newest are kept."""
MAX_BLOCKS = 50_000
"""Maximum number of blocks in a snapshot that a run writes by itself; the largest are kept."""
MAX_FILES = 8
"""Snapshots that a run writes by itself, over all ranks and restarts, unless one of them is written again."""


class MemoryRecorder:
    """Records one iteration on a GPU, and writes a snapshot when memory runs out. No method is a collective call."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        run, groups = trainer.run, trainer.groups
        self.on_gpu = groups.device.type == "cuda"
        ranks = parse_numbers(run.logging.memory_snapshot_ranks)
        self.iteration_to_record = run.logging.memory_snapshot if not ranks or groups.rank in ranks else None
        self.rank, self.folder = groups.rank, run.run_dir / FOLDER

    @contextlib.contextmanager
    def iteration(self, iteration: int) -> Iterator[None]:
        """Record one iteration if it is the chosen one. A failure to write is a warning."""
        if iteration != self.iteration_to_record:
            yield
            return
        # Writing C++ stacks as well takes more than a minute.
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=MAX_EVENTS)
        try:
            yield
            torch.cuda.synchronize()
            stem = self.folder / f"rank_{self.rank:05d}.iteration_{iteration}"
            warn_on_failure("the memory snapshot was not written", lambda: self._write_recorded(stem, iteration))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write_recorded(self, stem: Path, iteration: int) -> None:
        snapshot = torch.cuda.memory._snapshot()
        image, peak = self._write(snapshot, stem, f"rank {self.rank}, iteration {iteration}")
        logger.info("memory in iteration %d, at its peak: %s; see %s", iteration, peak, image)

    def out_of_memory(self, iteration: int) -> str | None:
        """Write a snapshot of the memory that has run out; return a line about it, or None without one.

        Call it while the error is handled, so that the tensors of the step still exist.
        """
        if not self.on_gpu:
            return None
        stem = self.folder / f"rank_{self.rank:05d}.out_of_memory_{iteration}"
        lines: list[str] = []

        def write() -> None:
            others = [path for path in self.folder.glob("*.out_of_memory_*.png") if path.stem != stem.name]
            snapshot = bounded(torch.cuda.memory._snapshot())
            timeline = timeline_of(snapshot, owned_memory(self.trainer), torch.cuda.current_device())
            if len(others) >= MAX_FILES:
                lines.append(f"memory: {summary(timeline)}")
                return
            image, peak = self._write(snapshot, stem, f"rank {self.rank}, out of memory in iteration {iteration}")
            lines.append(f"memory: {peak}; see {image} (--memory-snapshot ITER shows an iteration that fits over time)")

        warn_on_failure("the memory snapshot was not written", write)
        return lines[0] if lines else None

    def _write(self, snapshot: dict[str, Any], stem: Path, title: str) -> tuple[Path, str]:
        """Write STEM.pickle and STEM.png; return the image, and the peak in words."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with Path(f"{stem}.pickle").open("wb") as file:
            pickle.dump(snapshot, file)
        timeline = timeline_of(snapshot, owned_memory(self.trainer), torch.cuda.current_device())
        image = Path(f"{stem}.png")
        draw(timeline, image, f"{self.trainer.run.name}: {title}")
        return image, summary(timeline)


def bounded(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Return a snapshot with the newest events and, if there are too many blocks, the segments of the largest."""
    traces = [trace[-MAX_EVENTS:] for trace in snapshot["device_traces"]]
    segments = sorted(snapshot["segments"], key=lambda segment: -int(segment["allocated_size"]))
    largest: list[Any] = []
    count = 0
    for segment in segments:
        count += len(segment["blocks"])
        if count > MAX_BLOCKS and largest:
            break
        largest.append(segment)
    return snapshot | {"device_traces": traces, "segments": largest}


def owned_memory(trainer: Trainer) -> list[Owned]:
    """Return the memory of weights, gradients and optimizer state on this rank."""
    owned: dict[int, Owned] = {}

    def add(tensor: object, category: str) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if isinstance(local, Tensor) and local.device.type == "cuda":
            storage = local.untyped_storage()
            owned.setdefault(storage.data_ptr(), Owned(storage.data_ptr(), storage.nbytes(), category))

    for chunk in trainer.chunks:
        for parameter in chunk.parameters():
            add(parameter, "weights")
            add(parameter.grad, "gradients")
            add(vars(parameter).get("main_grad"), "gradients")
        for buffer in chunk.module.buffers():  # a wrapper of data parallelism has a list of this name
            add(buffer, "weights")
    for optimizer in chained(trainer.optimizer):
        for tensor in _state_of(optimizer):
            add(tensor, "optimizer state")
    return list(owned.values())


def _state_of(optimizer: MegatronOptimizer) -> Iterator[object]:
    """Yield the main copies of weights that an optimizer updates, and its moments."""
    for group in optimizer.param_groups:
        yield from group["params"]
    for values in optimizer.state.values():
        yield from values.values() if isinstance(values, dict) else [values]
