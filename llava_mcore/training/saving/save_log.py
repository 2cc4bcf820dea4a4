"""Duration and size of every save: a line on the console and one in saves.jsonl."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from llava_mcore.training.closing import warn_on_failure
from llava_mcore.training.logs.metrics_file import append_line

SAVES = "saves.jsonl"


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
        return f"{self.gigabytes:.3f} GB in {self.seconds:.2f} s, training waited {waited:.2f} s"

    def append_to(self, file: Path) -> None:
        """Append it to a file of JSON lines. A failure is only a warning, because the checkpoint is complete."""
        warn_on_failure(SAVES, lambda: append_line(file, json.dumps(asdict(self))))
