"""Logging to the console: INFO on rank 0, warnings of every rank with its number; failures that only warn."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import TextIO

from llava_mcore.errors import LlavaMcoreError, os_error_text

logger = logging.getLogger(__name__)

_NOISE = (
    "megatron.core",
    "torch.distributed",
    "transformers",
    "nvidia",
    "torch.utils",
    "torch.multiprocessing",
    "bitsandbytes",
)


def set_up(rank: int) -> None:
    """Send our own messages to stdout; libraries only log errors."""
    handler = _Console(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"rank {rank}: %(message)s"))
    package_logger = logging.getLogger("llava_mcore")
    package_logger.handlers[:] = [handler]
    package_logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    package_logger.propagate = False
    threading.excepthook = _thread_failed
    quiet_libraries()


class _Console(logging.StreamHandler[TextIO]):
    """A console that may be closed (`| head`) or on a full disk: then lines are lost, but the run continues."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


def _thread_failed(failed: threading.ExceptHookArgs) -> None:
    """Log errors of a library's thread, such as a full disk, in one line; the thread's owner gets them at its next
    call."""
    if isinstance(failed.exc_value, OSError):
        name = failed.thread.name if failed.thread is not None else "a thread"
        logger.warning("%s: %s", name, os_error_text(failed.exc_value))
    else:
        traceback.print_exception(failed.exc_value)


def prepare_streams() -> None:
    """Make standard input, output and error usable, whatever a process was started with.

    Closed streams are opened on /dev/null; otherwise the next file to be opened would get their number and the output.
    Characters that the console cannot encode, such as undecodable bytes of file names, are printed as escapes.
    """
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def quiet_libraries() -> None:
    """Let libraries log errors only: on a CPU they print a page of warnings about missing packages.

    transformers sets its own level when it is imported, which may be later: it reads the environment. Processes that
    this one starts inherit that.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in _NOISE:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def warn_on_failure(step: str, action: Callable[[], object]) -> None:
    """Do something that a run can do without; a failure is logged as a warning on one line.

    Later steps still run, and the error that ended the run, if any, stays the one that is reported. Caught are failures
    of files, servers and libraries. Programming errors, such as a TypeError, are raised as usual.
    """
    try:
        action()
    except OSError as error:
        _warn(step, os_error_text(error))
    except (LlavaMcoreError, RuntimeError, ValueError) as error:  # torch raises RuntimeError for a full disk
        _warn(step, str(error) or type(error).__name__)


def _warn(step: str, problem: str) -> None:
    logger.warning("%s: %s", step, " ".join(problem.split()))
