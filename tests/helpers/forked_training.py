"""Training runs whose ranks are forked from the tests' server, which has imported everything.

A start then takes a tenth of the CPU time, most of which goes into imports: those of the launcher, of torchrun and of
each rank. For tests of what a run computes; torchrun and the way a run ends need `tests.helpers.commands.run`.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

import torch
from torch.distributed import TCPStore

from llava_mcore.cli import train
from llava_mcore.launch import start as launch_start
from llava_mcore.launch import worker
from llava_mcore.processes.control import exit_now
from tests.helpers.commands import kill_tree, read_metrics
from tests.helpers.world import rank_environments, wait_for_ranks, write_output_to

KILLED = 137


def train_forked(*flags: object, kill_at: int | None = None, expect: int = 0) -> str:
    """Train as `run.py` does with these flags; return what launcher and ranks print.

    Args:
        kill_at: kill all ranks (-9) as soon as metrics.jsonl shows this iteration.
        expect: exit code of the launcher, and of every rank: none may have to be ended because another one has failed.
    """
    printed = io.StringIO()
    with (
        ranks_are_forked(kill_at=kill_at, expect=expect) as logs,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        code = train.main([str(flag) for flag in flags])
        text = "".join([printed.getvalue(), *(log.read_text(errors="replace") for log in sorted(logs.iterdir()))])
    assert code == (expect if kill_at is None else KILLED), f"exit code {code}\n{text[-6000:]}"
    return text


@contextlib.contextmanager
def ranks_are_forked(*, kill_at: int | None = None, expect: int = 0) -> Iterator[Path]:
    """Fork the ranks of runs that this process starts; yield the folder of what they print."""
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)

        def run_child(command: Sequence[str], environment: Mapping[str, str], *, program: str) -> int:
            return run_ranks(command, environment, logs=logs, kill_at=kill_at, expect=expect)

        with mock.patch.object(launch_start, "run_child", run_child):
            yield logs


def run_ranks(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    logs: Path | None = None,
    outputs: Sequence[Path] = (),
    kill_at: int | None = None,
    expect: int = 0,
) -> int:
    """Run the ranks that a command of torchrun would start; return the exit code of the first that fails.

    Args:
        logs: folder for a file of each rank's output; default: `outputs`, the files for output and errors of all.
        expect: every rank's exit code.
    """
    size = int(command[command.index("--nproc-per-node") + 1])
    config = Path(command[command.index("--config") + 1])
    # The store is here and not on rank 0, as with torchrun.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {**environment, "LOCAL_WORLD_SIZE": str(size)}
    context = multiprocessing.get_context("forkserver")
    ranks: list[BaseProcess] = [
        context.Process(
            target=_train, args=(config, {**shared, **own}, outputs if logs is None else [logs / f"rank{rank}"])
        )
        for rank, own in enumerate(rank_environments(size, store.port))
    ]
    for rank in ranks:
        rank.start()
    if kill_at is not None:
        _kill_at(ranks, config.parent, kill_at)
        return KILLED
    codes = wait_for_ranks(ranks, timeout=900, seconds_for_others=60 if expect else 1)
    assert not expect or set(codes) == {expect}, f"the ranks' exit codes are {codes}"
    return next((code for code in codes if code), 0)


def _train(config: Path, environment: dict[str, str], outputs: Sequence[Path]) -> None:
    """Be one rank."""
    os.environ.clear()
    os.environ.update(environment)
    write_output_to(*outputs)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # torch has been imported with other variables
    exit_now(worker.main(["--config", str(config)]))


def _kill_at(ranks: Sequence[BaseProcess], run_dir: Path, iteration: int) -> None:
    end = time.monotonic() + 900
    try:
        while not any(line["iteration"] >= iteration for line in read_metrics(run_dir)):
            assert all(rank.exitcode is None for rank in ranks), "a rank ended before that iteration"
            assert time.monotonic() < end, "the run did not get there in time"
            time.sleep(0.02)
    finally:
        for rank in ranks:
            assert rank.pid is not None
            kill_tree(rank.pid)
            rank.join()
