"""Runs the self-test in processes of its own, and turns its result into rows."""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llava_mcore.doctor.imports import last_line, run_limited
from llava_mcore.doctor.rows import DoctorRow

SECTION = "self-test"
SECONDS = 600
"""Limit of the self-test, which ends one that hangs; nearly all of its time is for imports."""
CPU_PROCESSES = 2
ADVICE = "NCCL_DEBUG=INFO shows what NCCL does"


@dataclass(frozen=True)
class Comparison:
    """One step beside transformers in fp32. parameter: the one whose gradient differs most, relative to its norm."""

    name: str
    loss: float
    expected_loss: float
    loss_limit: float
    parameter: str
    gradient_difference: float
    gradient_limit: float
    updated: bool

    @property
    def loss_difference(self) -> float:
        return abs(self.loss - self.expected_loss) / abs(self.expected_loss)

    @property
    def excess(self) -> float:
        """The larger of both differences, in units of its limit: above 1, or NaN, the step is wrong."""
        excess = max(self.loss_difference / self.loss_limit, self.gradient_difference / self.gradient_limit)
        return excess if math.isfinite(excess) and self.updated else math.inf


@dataclass(frozen=True)
class SelfTest:
    """The result of rank 0. wrong_sums: ranks on which an all-reduce gave a wrong sum. steps: worst rank of each."""

    device: Literal["cuda", "cpu"] | str
    num_processes: int
    layout: str
    wrong_sums: Sequence[int]
    steps: Sequence[Comparison]


def self_test_rows(num_gpus: int) -> list[DoctorRow]:
    """Run the self-test on all GPUs, or with two processes on the CPU, and return its rows."""
    device, size = ("cuda", num_gpus) if num_gpus else ("cpu", CPU_PROCESSES)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="llava_mcore-") as name:
        file = Path(name) / "result.json"
        command = [sys.executable, "-m", "llava_mcore.doctor.tiny_step", str(size), device, str(file)]
        _, errors, reason = run_limited(command, SECONDS)
        text = file.read_text(encoding="utf-8") if file.is_file() else None
    seconds = time.monotonic() - start
    if text is None or reason is not None:
        failure = reason or last_line(errors)
        advice = f" ({ADVICE})" if num_gpus > 1 else ""
        value = f"{size} {'GPUs' if num_gpus else 'processes'}"
        return [DoctorRow(SECTION, "training step", value, status="problem", message=f"failed: {failure}{advice}")]
    fields = json.loads(text)
    steps = [Comparison(**step) for step in fields.pop("steps")]
    return rows_of(SelfTest(**fields, steps=steps), seconds)


def rows_of(result: SelfTest, seconds: float) -> list[DoctorRow]:
    """Return a row of the all-reduce and one of each step."""
    where = f"{result.num_processes} {'GPUs' if result.device == 'cuda' else 'processes on the CPU'}, {result.layout}"
    message = ""
    if result.wrong_sums:
        ranks = ", ".join(map(str, result.wrong_sums))
        message = f"a sum over all ranks is wrong on rank {ranks} ({ADVICE})"
    rows = [DoctorRow(SECTION, "all-reduce", where, status="problem" if message else "ok", message=message)]
    for step in result.steps:
        is_right = step.excess <= 1
        value = f"loss {step.loss:.4f}, off by {step.loss_difference:.1e}; gradients by {step.gradient_difference:.1e}"
        expected = f"<={step.loss_limit:.0e}; <={step.gradient_limit:.0e}"
        message = "relative to transformers in fp32" if is_right else _what_differs(step)
        status: Literal["ok", "problem"] = "ok" if is_right else "problem"
        rows.append(DoctorRow(SECTION, step.name, value, expected, status, message))
    return [*rows, DoctorRow(SECTION, "duration", f"{seconds:.0f} s")]


def _what_differs(step: Comparison) -> str:
    if not step.updated:
        return "the optimizer has not updated the weights"
    return (
        f"a training step differs from transformers: loss {step.loss:.6f} instead of {step.expected_loss:.6f}, "
        f"gradient of {step.parameter} off by {step.gradient_difference:.1e}"
    )
