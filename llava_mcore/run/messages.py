"""How a process ends: one message for everything that is a user's or a machine's fault, and its exit code."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable

from llava_mcore.errors import FileError, LlavaMcoreError, os_error_text

NOBODY_READS = 128 + signal.SIGPIPE
"""Exit code of a command whose output goes into a closed pipe, as `| head` leaves one: that of cat and grep."""


def with_messages(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; what a user or the machine did wrong becomes one message on stderr.

    That is every LlavaMcoreError, and every OSError: files, folders and disks are the user's. Anything else is a
    mistake of ours and keeps its traceback.
    """
    try:
        code = command()
        _flush()
        return code
    except LlavaMcoreError as error:
        _say(str(error))
        return error.exit_code
    except OSError as error:
        if _nobody_reads():
            _drop_output()
            return NOBODY_READS
        _say(os_error_text(error))
        return FileError.exit_code
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich's way of ending then
            return NOBODY_READS
        raise


def _say(message: str) -> None:
    """Print an error behind what was printed before."""
    with contextlib.suppress(OSError, FileError):
        _flush()
    with contextlib.suppress(OSError):
        print(f"error: {message}", file=sys.stderr, flush=True)


def _flush() -> None:
    """Write what was printed: at the interpreter's end a failure could not be told any more.

    Raises:
        BrokenPipeError, FileError: it cannot be written.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_output()
        raise FileError(f"standard output: {error.strerror}") from error


def _nobody_reads() -> bool:
    """Tell whether standard output is a pipe whose reader has gone."""
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):  # a test's
        return False
    poll = select.poll()
    poll.register(number, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _drop_output() -> None:
    """Let what is still to be printed go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
