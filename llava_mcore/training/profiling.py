"""`--profile START:END`: traces of these iterations, and what holds memory on the GPU."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from llava_mcore.config.schema import RunConfig
from llava_mcore.config.sections.logs import parse_numbers, parse_span
from llava_mcore.parallel.groups import Groups
from llava_mcore.training.closing import warn_on_failure

logger = logging.getLogger(__name__)

FOLDER = "profile"
MEMORY_EVENTS = 200_000
"""Maximum number of allocations and frees in the memory snapshot; the newest are kept."""


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
