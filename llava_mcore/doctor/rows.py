"""A line of the doctor's table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "absent", "note", "problem"]


@dataclass(frozen=True)
class DoctorRow:
    """One thing that was looked at.

    expected: the versions that are allowed, if it has any. message: what it is for, or what is wrong and what to do.
    status: `absent` is optional and not there, `note` works but is worth reading, a `problem` must be solved.
    """

    section: str
    name: str
    value: str
    expected: str = ""
    status: Status = "ok"
    message: str = ""


def problems_of(rows: Iterable[DoctorRow]) -> list[str]:
    """Return the problems, one line each."""
    return [f"{row.name}: {row.message}" for row in rows if row.status == "problem"]


def table(rows: Sequence[DoctorRow]) -> str:
    """Return the rows as text, one block per section."""
    blocks = []
    for section in dict.fromkeys(row.section for row in rows):
        cells = [
            (f"  {row.status}", row.name, row.value, row.expected, row.message)
            for row in rows
            if row.section == section
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(x.ljust(width) for x, width in zip(row, widths, strict=True)).rstrip() for row in cells]
        blocks.append("\n".join([section, *lines]))
    return "\n\n".join(blocks)
