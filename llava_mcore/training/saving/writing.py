"""A save in progress, and the thread that writes this rank's files."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llava_mcore.checkpoint.dist import StateWrite
from llava_mcore.checkpoint.node_local import LocalWrite
from llava_mcore.errors import LlavaMcoreError


class Writing(threading.Thread):
    """A thread that writes this rank's files; `problem` tells later what went wrong."""

    def __init__(self, write: Callable[[], None], where: Path) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self._write, self._where = write, where
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._write()
        except BaseException as error:  # handed to the main thread
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
