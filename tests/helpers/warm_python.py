"""A `python` for command lines that is forked from the tests' server, which has imported everything.

A command spends ten seconds of CPU time on imports, and a run of two ranks forty. For pages and examples of several
commands: with it they take a quarter. What starts a command, and torchrun, is not what is tested then: the README's
commands, tests/e2e/test_installed.py and the tests of `run` in commands.py start as a user does.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import runpy
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from llava_mcore.launch import start as launch_start
from tests.helpers.commands import ROOT
from tests.helpers.forked_training import run_ranks
from tests.helpers.world import write_output_to

CLIENT = """#!{python} -IS
import json, os, socket, sys

arguments = sys.argv[1:]
script = os.path.abspath(arguments[0]) if arguments and arguments[0].endswith(".py") else ""
if arguments[:2] != ["-m", "llava_mcore"] and not script.startswith({root!r} + "/"):
    os.execv({python!r}, [{python!r}, *arguments])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    asked = {{"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ), "pid": os.getpid()}}
    server.sendall(json.dumps(asked).encode() + b"\\n")
    sys.exit(int(server.makefile().readline()))
"""
"""Asks for our commands and for scripts of this checkout; anything else is run by Python itself."""


@contextlib.contextmanager
def warm_python() -> Iterator[Path]:
    """Yield a program that runs Python's command lines in forked processes. Its folder has nothing else, for PATH."""
    with tempfile.TemporaryDirectory() as folder:
        address, program = str(Path(folder) / "socket"), Path(folder) / "bin" / "python"
        program.parent.mkdir()
        program.write_text(CLIENT.format(python=sys.executable, root=str(ROOT), address=address))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            threading.Thread(target=_serve, args=(listener, address, str(program)), daemon=True).start()
            yield program
            listener.shutdown(socket.SHUT_RDWR)


def _serve(listener: socket.socket, address: str, program: str) -> None:
    """Answer every request in a thread of its own, until the listener is shut down."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_answer, args=(connection, address, program), daemon=True).start()


def _answer(connection: socket.socket, address: str, program: str) -> None:
    """Run what one client asks for, and send it the exit code."""
    with connection:
        asked = json.loads(connection.makefile().readline())
        outputs = [Path(f"/proc/{asked['pid']}/fd/{number}") for number in (1, 2)]
        if "ranks" in asked:
            code = run_ranks(asked["ranks"], asked["environment"], outputs=outputs)
        else:
            command = multiprocessing.get_context("forkserver").Process(
                target=_be_command, args=(asked, outputs, address, program)
            )
            command.start()
            command.join()
            code = command.exitcode if command.exitcode is not None else 1
        connection.sendall(f"{code if code >= 0 else 128 - code}\n".encode())


def _be_command(asked: dict[str, Any], outputs: Sequence[Path], address: str, program: str) -> None:
    """Be `python ARGUMENTS` in the client's folder and environment; it prints where the client does."""
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    write_output_to(*outputs)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    sys.executable = program  # what examples start their commands with

    def ask_for_ranks(command: Sequence[str], environment: Mapping[str, str], *, program: str) -> int:
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(address)
            request = {"ranks": [*command], "environment": {**environment}, "pid": os.getpid()}
            server.sendall(json.dumps(request).encode() + b"\n")
            return int(server.makefile().readline())

    arguments = asked["arguments"]
    with mock.patch.object(launch_start, "run_child", ask_for_ranks):
        if arguments[0] == "-m":
            sys.argv, sys.path[:0] = arguments[1:], [asked["folder"]]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[:0] = arguments, [str(Path(arguments[0]).parent)]
            runpy.run_path(arguments[0], run_name="__main__")
