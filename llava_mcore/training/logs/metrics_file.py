"""Metrics of one iteration: a JSON object in metrics.jsonl and a line on the console."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from llava_mcore.errors import FileError
from llava_mcore.files.regular import naming, parse_object, read_text

FILE = "metrics.jsonl"
VALIDATION_FILE = "validation.jsonl"
ANSWERS_FILE = "answers.jsonl"

DEVICE_SUMS: list[str] = ["load_balancing", "router_z"]
"""Names of the sums that the model adds up in its forward pass (`add_sum` and `with_loss` in parallel/named_sums.py).
Those of `LOSS_TERMS` in training/loss_terms.py are known without being here."""


@dataclass(frozen=True)
class Metrics:
    """One iteration. Seconds are wall time; tokens exclude padding; fill: the fraction of a batch that is not padding.

    loss, grad_norm: None if the iteration's data was not trained on. updated: whether the weights changed.
    lr_by_part: the learning rate of each trained part.
    skipped_iterations, failed_updates: totals of the run so far.
    mfu: model FLOPs utilization, None if the device's peak is unknown; memory: the peak allocation of rank 0 on its GPU
    since the start, None without a GPU.
    """

    iteration: int
    loss: float | None
    grad_norm: float | None
    lr: float
    lr_by_part: dict[str, float]
    updated: bool
    num_tokens: int
    num_trained_tokens: int
    num_conversations: int
    num_skipped: int
    num_truncated: int
    fill: float
    tokens_per_second: float
    step_seconds: float
    data_wait_seconds: float
    consumed_samples: int
    skipped_iterations: int
    failed_updates: int
    tflops_per_device: float
    mfu: float | None
    memory_gib: float | None
    time_to_first_iteration_seconds: float | None = None
    """From the start of the process to the end of its first iteration; None for later ones."""
    start_seconds: dict[str, float] | None = None
    """The phases of that time; None for later iterations."""
    sums: dict[str, float] = field(default_factory=dict)
    """Values of named sums that have no field of their own."""

    def record(self) -> dict[str, Any]:
        """Return the object to write as a JSON line: the fields, then the named sums."""
        values = asdict(self)
        sums = values.pop("sums")
        return values | sums

    def line(self, total: str, num_devices: int, rest: str = "") -> str:
        """Return the console line.

        Args:
            total: iterations of the run, and its epoch, as text.
            rest: time that the run still takes, as text.
        """
        rate = self.tokens_per_second / num_devices / 1000
        wait = 100 * self.data_wait_seconds / self.step_seconds if self.step_seconds else 0.0
        speed = f"{rate:.2f}k tok/s/device"
        if self.mfu is not None:
            speed += f" | {self.tflops_per_device:.0f} TF/s/device | MFU {100 * self.mfu:.1f} %"
        lost = [(self.num_skipped, "skipped"), (self.num_truncated, "truncated")]
        losses = "".join(f" | {count} samples {reason}" for count, reason in lost if count)
        losses += "".join(f" | {name} {value:.4g}" for name, value in self.sums.items())
        if not self.updated:
            losses += " | weights not changed"
        loss = "-" if self.loss is None else f"{self.loss:.4f}"
        grad_norm = "-" if self.grad_norm is None else f"{self.grad_norm:.3f}"
        return (
            f"step {self.iteration}/{total} | loss {loss} | grad norm {grad_norm} | "
            f"lr {self.lr:.2e} | {speed} | data wait {wait:.1f} % | {self.step_seconds:.2f} s{rest}{losses}"
        )


def named_values(sums: Mapping[str, tuple[float, float]]) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the values of named sums: total / count, or the total where nothing is counted. First those that are
    fields of `Metrics`, then the others."""
    values = {name: total / count if count else total for name, (total, count) in sums.items()}
    known = {field.name for field in fields(Metrics)}
    as_fields = {name: value for name, value in values.items() if name in known}
    return as_fields, {name: value for name, value in values.items() if name not in known}


class JsonLinesWriter:
    """Appends objects to a file of JSON lines; after a resume, lines beyond the checkpoint are dropped."""

    def __init__(self, path: Path, *, keep_until: int, value: str = "loss") -> None:
        """Drop lines that will be written again.

        Args:
            keep_until: the iteration that the run resumes from.
            value: name of a number that every line has, or null.

        Raises:
            FileError: the file has other contents.
        """
        self.path = path
        records = [record for record in read_lines(path, value) if record["iteration"] <= keep_until]
        self.values: list[float | None] = [record[value] for record in records]
        temporary = self.path.with_suffix(".partial")
        with naming(temporary):
            temporary.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        os.replace(temporary, self.path)

    def write(self, record: dict[str, Any]) -> None:
        """Write one object. Floats have full precision, so equal lines mean equal bits; NaN and infinity become null.

        Raises:
            OSError: it cannot be written; the file then stays as it was, without a partial line.
        """
        values = {key: None if is_not_finite(value) else value for key, value in record.items()}
        append_line(self.path, json.dumps(values, allow_nan=False))


def append_line(path: Path, line: str) -> None:
    """Append a line to a file; if that fails, the file stays as it was."""
    with naming(path), path.open("ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        data = f"{line}\n".encode()
        try:
            while data:  # a full disk takes only the first part
                data = data[file.write(data) :]
        except OSError:
            file.truncate(before)
            raise


def read_lines(path: Path, value: str = "loss") -> list[dict[str, Any]]:
    """Return the objects of a run's file of JSON lines; none if the file does not exist.

    A last line that a kill or a full disk has truncated is skipped.

    Raises:
        FileError: a line is not an object with an iteration and the value.
        OSError: the file cannot be read.
    """
    if not path.exists():
        return []
    lines = read_text(path).split("\n")[:-1]
    return [_record(line, f"{path}, line {index}", value) for index, line in enumerate(lines, 1)]


def _record(line: str, where: str, value: str) -> dict[str, Any]:
    record = parse_object(line, where)
    iteration, content = record.get("iteration"), record.get(value, "missing")
    if type(iteration) is not int or not (content is None or isinstance(content, int | float)):
        raise FileError(f"{where}: expected 'iteration' and '{value}', as a run writes them; move the file away")
    return record


class MetricsFile(JsonLinesWriter):
    """`metrics.jsonl`, one object per iteration."""

    def __init__(self, run_dir: Path, *, keep_until: int) -> None:
        super().__init__(run_dir / FILE, keep_until=keep_until)

    def append(self, metrics: Metrics) -> None:
        """Write one iteration."""
        self.write(metrics.record())


def is_not_finite(value: object) -> bool:
    """Return whether a value is a float that is NaN or infinite."""
    return isinstance(value, float) and not math.isfinite(value)
