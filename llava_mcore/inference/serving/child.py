"""A `serve` process of our own, which ends when we do."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import IO

from llava_mcore.errors import ConfigError
from llava_mcore.processes.parent import tied_command

READY = re.compile(r"^serving .* at (http://\S+/v1)")
SECONDS_TO_END = 10


@contextlib.contextmanager
def server(flags: Sequence[str]) -> Iterator[str]:
    """Start `serve` with these flags at a free port; yield its address; end it.

    Raises:
        ConfigError: it could not start; its message has been printed.
    """
    serve = [sys.executable, "-m", "llava_mcore", "serve", "--port", "0", *flags]
    command = tied_command(serve, signal.SIGTERM)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    try:
        yield _address(process, process.stdout)
    finally:
        process.terminate()
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()


def _address(process: subprocess.Popen[str], output: IO[str]) -> str:
    for line in output:
        print(line, end="", flush=True)
        if match := READY.match(line):
            threading.Thread(target=_copy, args=(output,), daemon=True).start()
            return match[1]
    raise ConfigError(f"the server ended with exit code {process.wait()}; its message is above")


def _copy(output: IO[str]) -> None:
    """Print what a process prints, so that it never waits for us."""
    for line in output:
        print(line, end="", flush=True)
