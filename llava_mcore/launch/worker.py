"""One training process: `torchrun … -m llava_mcore.launch.worker --config run.yaml`."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from llava_mcore import log
from llava_mcore.compat.startup import find_distributions_lazily, skip_unused_imports
from llava_mcore.compat.tested import untested_line
from llava_mcore.config.load import load_run_config
from llava_mcore.errors import FileError, LlavaMcoreError, os_error_text
from llava_mcore.processes.control import (
    INTERRUPTED,
    STOPPED_EARLY,
    StopSignals,
    exit_now,
    imports_without_collections,
)
from llava_mcore.processes.parent import die_with_parent

LOST_CONNECTION = 1
"""The same exit code as after a traceback: torchrun's wrapper looks for another rank's first."""

logger = logging.getLogger("llava_mcore.launch.worker")  # run with -m, the module has another name


def main(argv: Sequence[str] | None = None) -> int:
    """Train as run.yaml says; return 0, 75 if stopped early, 130 after Ctrl-C, else an error's own exit code."""
    signals, started = StopSignals(), time.monotonic()
    parser = argparse.ArgumentParser(prog="llava_mcore.launch.worker", allow_abbrev=False)
    parser.add_argument("--config", type=Path, required=True, help="resolved run.yaml")
    parser.add_argument("--parent", type=int, metavar="PID", help="process to end with (torchrun adds it)")
    args = parser.parse_args(argv)
    # A worker without its torchrun would wait for the others forever.
    die_with_parent(signal.SIGKILL, args.parent)
    with signals:
        return _train(args.config, signals, started)
    return INTERRUPTED


def _train(config: Path, signals: StopSignals, started: float) -> int:
    """Train; return the exit code, after a message for an error."""
    # Set up the console first, because the next steps may fail.
    rank = int(os.environ["RANK"])
    log.prepare_streams()
    log.set_up(rank)
    untested = untested_line() if rank == 0 else None
    if untested is not None:
        logger.warning(untested)
    try:
        run = load_run_config(config, [], {})
        logs = {"wandb": run.logging.wandb, "tensorboard": run.logging.tensorboard}
        find_distributions_lazily()
        skip_unused_imports(*(name for name, is_on in logs.items() if not is_on))  # megatron-core's timers import them
        # Heavy imports come after the first console lines, and skip packages that this run does not use.
        with imports_without_collections():
            from llava_mcore.training.assembly import assembled

        with assembled(run, signals, started) as loop:
            finished = loop.run()
    # One message for each error that is not a bug; if all ranks have the same one, only rank 0 prints it.
    except LlavaMcoreError as error:
        if rank == 0 or not error.on_all_ranks:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except OSError as error:
        print(f"error: rank {rank}: {os_error_text(error)}", file=sys.stderr, flush=True)
        return FileError.exit_code
    except RuntimeError as error:
        if not lost_connection(error):
            raise
        print(f"rank {rank} has lost its connection to another rank, which has ended", file=sys.stderr, flush=True)
        return LOST_CONNECTION
    return 0 if finished else STOPPED_EARLY


def lost_connection(error: RuntimeError) -> bool:
    """Return whether gloo met a closed connection: another rank has ended, and its own message says why."""
    text = str(error)
    return "gloo" in text and ("Connection closed by peer" in text or "Connection reset by peer" in text)


if __name__ == "__main__":  # a checkpoint save imports this module again: keep the guard
    exit_now(main())
