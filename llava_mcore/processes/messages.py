"""Exit of a process: one message for every error that is not a bug, and the exit code."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable

from llava_mcore.errors import FileError, LlavaMcoreError, os_error_text

NOBODY_READS = 128 + signal.SIGPIPE
"""Exit code of a command whose output goes to a closed pipe, as with `| head`; the same as that of cat and grep."""


def with_messages(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; errors of users and machines become one message on stderr.

    These are every LlavaMcoreError and every OSError (files, folders, disks). Anything else is a bug and keeps its
    traceback.
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
        if isinstance(end.__context__, BrokenPipeError):  # rich ends this way then
            return NOBODY_READS
        raise


def _say(message: str) -> None:
    """Flush the output and print an error after it."""
    with contextlib.suppress(OSError, FileError):
        _flush()
    with contextlib.suppress(OSError):
        print(f"error: {message}", file=sys.stderr, flush=True)


def _flush() -> None:
    """Flush the output: at the interpreter's exit a failure could no longer be reported.

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
    """Return whether standard output is a pipe that its reader has closed."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # a test's
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _drop_output() -> None:
    """Discard all further output."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
