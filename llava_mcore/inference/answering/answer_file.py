"""The file of `generate --out`, written as answers come, so that a killed run loses none of them."""

from __future__ import annotations

import contextlib
import glob
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


def of_replica(partial: Path, replica: int) -> Path:
    """Return the file that has a replica's answers until all are there. `partial`: that of the whole command."""
    return partial.with_name(f"{partial.name}.{replica}")


def finish(out: Path) -> None:
    """Give the file of all answers its name, and remove those of replicas, also of a killed command with more."""
    partial = partial_of(out)
    move(partial, out)
    for file in out.parent.glob(f"{glob.escape(partial.name)}.*"):
        if file.name.removeprefix(f"{partial.name}.").isdecimal():
            file.unlink()


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
