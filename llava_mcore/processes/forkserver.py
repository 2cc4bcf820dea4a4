"""Processes that are forked from a server with everything imported, and end with the command that started them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import forkserver

PRELOADED = "llava_mcore.processes.preload"
"""Module that silences libraries before others are imported."""
FIRST = "llava_mcore.processes.forkserver_end"


def start_forkserver(*modules: str) -> None:
    """Start the server, which imports modules once for all its processes. They ignore Ctrl-C: the command ends them."""
    multiprocessing.set_forkserver_preload([FIRST, *modules])
    with without_interrupts():
        forkserver.ensure_running()


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C, also in processes that are started meanwhile and in theirs. In the main thread only."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


@contextlib.contextmanager
def interrupts_afterwards() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block, for libraries that treat it as a failure. In the main thread only."""
    came = threading.Event()
    handler = signal.signal(signal.SIGINT, lambda *_: came.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came.is_set():
        raise KeyboardInterrupt


def end_with_parent() -> None:
    """Let this process end once the one that asked for it has ended, even by kill -9."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)
