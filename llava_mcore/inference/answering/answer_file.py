"""The file of `generate --out`, written as answers come, so that a killed run loses none of them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from llava_mcore.files.atomic import move
from llava_mcore.files.regular import naming
from llava_mcore.inference.generation.records import Record


def partial_of(out: Path) -> Path:
    """Return the file beside `out` that has the answers until all are there."""
    return out.with_name(f"{out.name}.partial")


def finish(out: Path) -> None:
    """Give the file of all answers its name."""
    move(partial_of(out), out)


@contextlib.contextmanager
def written_to(path: Path | None) -> Iterator[Callable[[Sequence[Record]], None]]:
    """Create a file. Call the result with all records so far, as often as there are new ones.

    Records are written in their order: one that is finished waits for those before it.

    Args:
        path: None: nothing is written.
    """
    if path is None:
        yield lambda _: None
        return
    num_written = 0
    with naming(path), path.open("wb") as file:

        def write(records: Sequence[Record]) -> None:
            nonlocal num_written
            while num_written < len(records) and records[num_written].is_finished:
                line = json.dumps(records[num_written].line(), ensure_ascii=False) + "\n"
                file.write(line.encode("utf-8", "surrogatepass"))
                num_written += 1
            file.flush()

        yield write
        os.fsync(file.fileno())
