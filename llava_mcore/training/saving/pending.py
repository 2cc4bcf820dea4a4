"""A save in progress: the thread that writes this rank's files, host memory for it, and its line in saves.jsonl."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from llava_mcore.checkpoint.dist import StateWrite
from llava_mcore.checkpoint.node_local import LocalWrite
from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import LlavaMcoreError
from llava_mcore.files.sizes import size_text
from llava_mcore.log import warn_on_failure
from llava_mcore.training.logs.metrics_file import append_line

logger = logging.getLogger(__name__)

SAVES = "saves.jsonl"
STEPS_WITH_GRAPHS = 4
"""Most shapes of CUDA graphs occur in these steps. When torch captures one, it gives all unused host memory back."""


class Writing(threading.Thread):
    """A thread that writes this rank's files; `problem` tells later what went wrong."""

    def __init__(self, write: Callable[[], None], where: Path) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self._write, self._where = write, where
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._write()
        # Catch everything, even SystemExit: a thread that ends without an error means that its files are complete.
        except BaseException as error:
            self._error = error

    def problem(self) -> str | None:
        """Wait for the thread; return why the files could not be written, None if they were.

        Raises:
            Exception: an error of the program, as it was raised in the thread.
        """
        self.join()
        if self._error is None:
            return None
        if isinstance(self._error, OSError):
            return f"{self._where}: {self._error}"
        if isinstance(self._error, (LlavaMcoreError, RuntimeError, MemoryError)):  # torch raises RuntimeError
            return f"{self._where}: {type(self._error).__name__}: {self._error}"
        raise self._error


@dataclass
class Pending:
    """A save in progress. `writing` writes this rank's files; `background`: training continues meanwhile."""

    final: Path
    record: dict[str, Any]
    iteration: int
    write: StateWrite | LocalWrite
    num_bytes: int
    background: bool
    started: float
    waited: float
    """Seconds that training has waited for it."""
    writing: Writing | None = None
    checksums: dict[str, str] = field(default_factory=dict)
    """Checksums of this rank's files, by path relative to the checkpoint's folder."""

    @property
    def partial(self) -> Path:
        return self.final.parent / f".{self.final.name}.partial"

    @property
    def is_written(self) -> bool:
        return self.writing is None or not self.writing.is_alive()


@dataclass(frozen=True)
class Saved:
    """One line of saves.jsonl. Seconds are wall time on rank 0; training waited for those of `start_` and `finish_`.
    finished_after_iteration: the last iteration that was trained before the save was complete."""

    iteration: int
    background: bool
    finished_after_iteration: int
    gigabytes: float
    seconds: float
    start_waited_seconds: float
    finish_waited_seconds: float

    def __str__(self) -> str:
        waited = self.start_waited_seconds + self.finish_waited_seconds
        return f"{size_text(self.gigabytes * 1e9)} in {self.seconds:.2f} s, training waited {waited:.2f} s"

    def append_to(self, file: Path) -> None:
        """Append it to a file of JSON lines. A failure is only a warning, because the checkpoint is complete."""
        warn_on_failure(SAVES, lambda: append_line(file, json.dumps(asdict(self))))


def steps_before_allocation(run: RunConfig) -> int | None:
    """Return after how many steps the memory for saves in the background is allocated.

    None: not before the first save. With an optimizer whose state is on the host, little else is copied from the GPU.
    """
    if run.optimizer.cpu_offload:
        return None
    return STEPS_WITH_GRAPHS if run.model.cuda_graphs else 1


def allocate_in_background(sizes: Sequence[int], device: torch.device) -> threading.Thread:
    """Begin to allocate pinned memory, which torch keeps and gives to the next copies of these sizes.

    Args:
        sizes: bytes of each tensor that a save copies to the host at the same time.
        device: this rank's GPU.
    """

    def allocate() -> None:
        torch.cuda.set_device(device)  # a thread starts with the first GPU, and would use memory there
        try:
            _ = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
        except RuntimeError as error:
            logger.warning(
                "%s of host memory for saves in the background could not be pinned: %s; the first save stops "
                "training while it tries again: free host memory, or omit --async-save", size_text(sum(sizes)), error
            )  # fmt: skip

    thread = threading.Thread(target=allocate, name="host memory", daemon=True)
    thread.start()
    return thread
