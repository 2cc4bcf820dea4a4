"""Configuration of errors, hangs and time limits."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from llava_mcore.config.sections.base import Flag, Needs, Seconds, Section

_RANGE = re.compile(r"(\d{1,10})-(\d{1,10})")


def parse_ranges(text: str | None) -> tuple[range, ...]:
    """Return the iterations that `A-B[,C-D]` or `A-B C-D` names, ends included. ValueError for anything else."""
    ranges = []
    for part in (text or "").replace(",", " ").split():
        match = _RANGE.fullmatch(part)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ValueError(f"expected ranges of iterations such as 100-110 300-300, found {part!r}")
        ranges.append(range(int(match[1]), int(match[2]) + 1))
    return tuple(ranges)


def _ranges_text(text: str) -> str:
    parse_ranges(text)
    return text


Ranges = Annotated[str, AfterValidator(_ranges_text)]


class FaultConfig(Section):
    """Hangs, NaN and infinite values, spikes of the loss, the end of a job's time."""

    flag_group = "faults and limits"

    timeout: Annotated[Seconds, Flag("--timeout")] = 1200
    """Seconds that one iteration, a save or a part of the start may take before the job ends with the stacks of every
    rank."""
    exit_duration_in_mins: Annotated[float | None, Flag("--exit-duration-in-mins")] = Field(None, gt=0, le=10**7)
    """Minutes after which the run saves and ends with exit code 75, at the end of an iteration."""
    on_nan: Annotated[Literal["stop", "skip"], Flag("--on-nan")] = "stop"
    """When loss or gradients are not finite: end the run without saving, or skip the update and continue (at most 10 in
    a row), for which the host waits for the device in every iteration. The batch is written to SAVE_DIR/NAME/faults."""
    alert_spike: Annotated[bool, Flag("--alert-spike")] = False
    """Warn of a loss far above the previous ones, and suggest which iterations to skip."""
    spike_thr: Annotated[float, Flag("--spike-thr"), Needs("faults.alert_spike")] = Field(2.0, gt=1)
    """A spike is a loss above this times the median of the last 32."""
    skip_train_iteration_range: Annotated[Ranges | None, Flag("--skip-train-iteration-range", many=True)] = None
    """Iterations whose data is read but not trained on, such as 100-110 300-300 (both ends included)."""
