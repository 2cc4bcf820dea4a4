"""The progress of `prepare` on the console."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID


class PrepareBar:
    """A line with bar, rate and remaining time."""

    def __init__(self, console: Console) -> None:
        """console: where the line is."""
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        rate, columns = TextColumn("{task.fields[rate]}"), (BarColumn(), MofNCompleteColumn())
        text = TextColumn("{task.description}")
        self._progress = Progress(SpinnerColumn(), text, *columns, rate, TimeRemainingColumn(), console=console)
        self._task: TaskID | None = None

    def __enter__(self) -> PrepareBar:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def begin(self, activity: str, total: int | None) -> None:
        """Start showing a new step."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(activity, total=total, rate="")

    def advance(self, count: int) -> None:
        """Advance the bar."""
        assert self._task is not None
        self._progress.update(self._task, advance=count)
        speed = self._progress.tasks[-1].speed
        self._progress.update(self._task, rate="" if speed is None else f"{speed:,.0f}/s")
