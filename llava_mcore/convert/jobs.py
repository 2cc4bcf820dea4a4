"""Shared by import and export: dtypes, a progress bar, parallel jobs, and comparing digests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from llava_mcore.errors import ConversionError, problems
from llava_mcore.files.atomic import sync
from llava_mcore.parallel.cores import run_jobs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Sized(Protocol):
    """A job, an entry or a result, with its number of bytes."""

    @property
    def num_bytes(self) -> int: ...


class Done(Sized, Protocol):
    """A result, with the files that the job wrote to."""

    @property
    def paths(self) -> frozenset[Path]: ...


def run_with_progress[Job: Sized, Result: Done](
    title: str, function: Callable[[Job], Result], jobs: Sequence[Job], *, workers: int
) -> Iterator[Result]:
    """Yield `function(job)` for every job, with a progress bar (bytes, speed, time left) on a terminal.

    Written files are flushed to disk meanwhile, so that little remains at the end.
    """
    syncing: Future[None] = Future()
    syncing.set_result(None)
    with ThreadPoolExecutor(1) as syncer, _bar(title, sum(x.num_bytes for x in jobs)) as advance:
        for result in run_jobs(function, jobs, workers=workers):
            advance(result.num_bytes)
            if syncing.done():
                syncing.result()
                syncing = syncer.submit(_sync, result.paths)
            yield result
        syncing.result()


def _sync(paths: Iterable[Path]) -> None:
    for path in paths:
        sync(path)


@contextlib.contextmanager
def _bar(title: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=num_bytes)
        yield lambda n: bar.update(task, advance=n)


def compare_digests(actual: Mapping[str, str], expected: Mapping[str, str], *, title: str) -> None:
    """Compare the SHA-256 of tensors.

    Raises:
        ConversionError: lists every tensor that differs, is missing, or is unexpected.
    """
    wrong = [f"{name}: is missing" for name in sorted(expected.keys() - actual.keys())]
    wrong += [f"{name}: is not expected" for name in sorted(actual.keys() - expected.keys())]
    wrong += [
        f"{name}: SHA-256 {actual[name][:12]}…, expected {expected[name][:12]}…"
        for name in sorted(actual.keys() & expected.keys())
        if actual[name] != expected[name]
    ]
    if wrong:
        raise ConversionError(problems(title, wrong))
