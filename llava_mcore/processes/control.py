"""Starting and ending processes: children that end with us, signals, messages of errors, exit codes."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import NoReturn

from llava_mcore.errors import FileError, LlavaMcoreError, os_error_text
from llava_mcore.processes.parent import tied_command

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
ENDING = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Those that end a run at once; the others ask it to save first."""
STOP = signal.SIGUSR1
"""The signal that asks a training process to save and end after the current iteration."""
STOPPED_EARLY = 75
"""Exit code of a run that was asked to end before its last iteration: EX_TEMPFAIL, "try again"."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C, as a shell reports it."""
NOBODY_READS = 128 + signal.SIGPIPE
"""Exit code of a command whose output goes to a closed pipe, as with `| head`; the same as that of cat and grep."""
_LAST_SECONDS = 2.5


@contextlib.contextmanager
def imports_without_collections() -> Iterator[None]:
    """Import without garbage collections, which find nothing and take a seventh of the time (1.2 of 9.8 s of CPU time
    for a training process); later ones leave out what was imported."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def collect_rarely() -> None:
    """The same for a short process whose imports are spread over it: collect garbage rarely.

    Not where garbage may hold a GPU's memory.
    """
    gc.set_threshold(50_000, 20, 50)


def run_child(argv: Sequence[str], env: Mapping[str, str] | None = None, *, program: str | None = None) -> int:
    """Run a command, forward our signals to it, and return its exit code (128 + n if signal n ended it).

    The child has its own session: otherwise Ctrl-C in a terminal would reach it twice. Call this in the main thread.
    `argv[0]` must exist: otherwise 1 is returned, after a traceback.

    Args:
        program: name of the command, if it is one of our programs. It starts with the FORWARDED signals blocked and
            unblocks them when it is ready, and it is killed if we are; another command gets SIGTERM then. If the
            command is killed, a message says so.
    """
    # A signal may come before there is a child: it is kept for it.
    pending: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def forward(signal_number: int, _frame: FrameType | None) -> None:
        if child is None:
            pending.append(signal_number)
        else:
            child.send_signal(signal_number)

    before = {signal_number: signal.signal(signal_number, forward) for signal_number in FORWARDED}
    # The command ends with us, however we end.
    signal_number = signal.SIGKILL if program else signal.SIGTERM
    command = tied_command(argv, signal_number, held=program is not None)
    try:
        # Blocked, so that a signal cannot end the child before it can answer.
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        try:
            child = subprocess.Popen(command, env=None if env is None else dict(env), start_new_session=True)
        finally:
            unblock_signals()
        for waiting in pending:
            child.send_signal(waiting)
        code = child.wait()
    finally:
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)
    # A shell reports signals as codes above 128.
    if code < 0 and program is not None:
        print(f"error: {program} was ended by {signal.Signals(-code).name}", file=sys.stderr)
    return code if code >= 0 else 128 - code


def unblock_signals() -> None:
    """Unblock the signals that `run_child` forwards."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)


class StopSignals:
    """Handles signals of a training process, whatever its main thread is doing.

    SIGUSR1 asks it to save and end. torchrun forwards a SIGTERM that it got as SIGUSR1, and sends SIGTERM itself only
    to the remaining ranks when one has failed. These end within 2.5 seconds, but wait for the SIGUSR1 that follows when
    every process was sent a SIGTERM. SIGINT interrupts the main thread, and ends the process after the same time.

    `on_terminate` is called after each SIGTERM, in a thread of its own.

    As a context it suppresses what an interrupted main thread raises: other ranks may end earlier. Before it is
    entered, SIGINT ends the process at once.
    """

    def __init__(self) -> None:
        """Take over the signals, including those that were blocked when torchrun started us. Call it in the main
        thread."""
        self.asked = False
        self.interrupted = False
        self.on_terminate: Callable[[], None] | None = None
        self._entered = False
        self._signal_pipe, write_end = os.pipe()
        os.set_blocking(write_end, False)
        # Python's own handlers run in the main thread, which may hang in a collective call. These bytes arrive even
        # then.
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for signal_number in (STOP, signal.SIGTERM, signal.SIGINT):
            signal.signal(signal_number, self._handle)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()
        unblock_signals()

    def __enter__(self) -> None:
        self._entered = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return kind is not None and self.interrupted

    def _handle(self, signal_number: int, _frame: FrameType | None) -> None:
        if signal_number == signal.SIGINT:
            self.interrupted = True
            if not self._entered:
                os._exit(INTERRUPTED)
            raise KeyboardInterrupt

    def _watch(self) -> None:
        deadline: float | None = None
        code = 0
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._signal_pipe], [], [], left)[0]:
                os._exit(code)
            for signal_number in os.read(self._signal_pipe, 64):
                if signal_number == STOP:
                    self.asked = True
                    deadline = deadline if self.interrupted else None
                elif signal_number == signal.SIGINT:
                    self.interrupted = True
                elif signal_number == signal.SIGTERM and self.on_terminate is not None:
                    self.on_terminate()
                if deadline is None and (
                    signal_number == signal.SIGINT or (signal_number == signal.SIGTERM and not self.asked)
                ):
                    deadline, code = time.monotonic() + _LAST_SECONDS, 128 + signal_number


def exit_now(code: int) -> NoReturn:
    """End a process: exit handlers run and output is flushed, but the interpreter is not torn down.

    There are two reasons. Freeing what torch and transformers have loaded takes a launcher over a second. And a gloo
    thread may hold the tensors of the last collective a moment longer than Python does; if it frees them while the
    interpreter shuts down, the process ends by SIGABRT, whatever its exit code (pytorch's pull request 179291). Running
    threads are not waited for, unless their `join` is an exit handler.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):  # closed by `| head`
            stream.flush()
    os._exit(code)


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
