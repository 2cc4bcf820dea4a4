"""Shows how many samples of a dataset are answered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextlib.contextmanager
def shown_progress(total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, unless there is a single question. Call the result with the number that is done.

    total: None if it is not known.
    """
    console = Console(stderr=True)
    columns = (TextColumn("answering"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal or total == 1) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, completed=done)
