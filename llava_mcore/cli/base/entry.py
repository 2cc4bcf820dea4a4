"""The entry of the program and of each command: choose the command, parse, run, report errors."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from llava_mcore import log
from llava_mcore.cli.base.commands import COMMANDS
from llava_mcore.compat.startup import UNUSED_IMPORTS_HERE, find_distributions_lazily, skip_unused_imports
from llava_mcore.compat.tested import untested_line
from llava_mcore.errors import FileError
from llava_mcore.launch.singularity import inner_command, requested_image, rerun_in_container
from llava_mcore.processes.control import INTERRUPTED, collect_rarely, with_messages

CONSOLE_SCRIPT = "llava-mcore"


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; 2 if there is no such command, 130 after Ctrl-C."""
    log.prepare_streams()
    try:
        return with_messages(lambda: _run(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(arguments: list[str]) -> int:
    name = arguments[0] if arguments else ""
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        print(f"{name!r}: no such command{meant}\n\n{_usage()}" if name else _usage(), file=sys.stderr)
        return 2
    command = COMMANDS[name]
    _require_current_folder()
    submits = name == "train" and "--submit" in arguments  # the job enters the image, not the process that submits it
    image = requested_image(arguments) if command.has_image and not submits else None
    if image is not None:
        # Before importing packages that may be in the image only.
        return rerun_in_container(image, inner_command(name, arguments[1:]), dry_run="--dry-run" in arguments)
    log.quiet_libraries()
    find_distributions_lazily()
    # This process of `train` only checks the run, then waits for others; those that answer place no model on devices,
    # unless it is loaded in 4 or 8 bits.
    answers = name in ("generate", "chat") and not {"--load-in-4bit", "--load-in-8bit"} & {*arguments}
    if name == "train" or answers:
        skip_unused_imports("wandb")
    if name == "serve":
        skip_unused_imports("wandb", "tensorboard", keep=("accelerate",))  # its handler asks for accelerate
    if name in ("check", "prepare"):
        skip_unused_imports("wandb", "tensorboard")
    if not command.uses_gpus or name == "train":
        collect_rarely()
    if not command.uses_gpus:
        # These commands run on the CPU; a visible GPU would be initialized and occupied. Before torch is imported.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    code: int = importlib.import_module(f"llava_mcore.cli.{command.file}").main(arguments[1:], typed_program(name))
    return code


def typed_program(name: str) -> str:
    """Return how this process was started, for usage lines: the module, `llava-mcore`, or a file of scripts/."""
    program = Path(sys.argv[0]).name
    if program == "__main__.py":
        return f"python -m llava_mcore {name}"
    return f"{program} {name}" if program == CONSOLE_SCRIPT else program


def _require_current_folder() -> None:
    """Raise FileError if the current folder does not exist: relative paths and many libraries would fail."""
    try:
        os.getcwd()
    except OSError as error:
        raise FileError(
            f"the current folder: {error.strerror}; it was deleted or moved: cd to an existing folder"
        ) from error


def _usage() -> str:
    lines = [f"  {command.name:<12} {command.summary}" for command in COMMANDS.values()]
    return "\n".join(
        [f"usage: {typed_program('COMMAND')} [--help] …", "", *lines, "", "COMMAND --help lists its flags."]
    )


class CommandMain(Protocol):
    """Runs a command with arguments, by default those of the process, and returns its exit code.

    `program` is what usage lines name; by default the module and the command.
    """

    def __call__(self, argv: Sequence[str] | None = None, program: str | None = None) -> int: ...


def command_main(
    parser: Callable[[], argparse.ArgumentParser],
    run: Callable[[argparse.Namespace], int],
    *,
    warns_of_versions: bool = True,
) -> CommandMain:
    """Return the entry of a command: it parses, runs, and turns errors into one message and an exit code.

    `parser` must not import torch, so that --help and a mistyped flag are answered at once.
    """

    def main(argv: Sequence[str] | None = None, program: str | None = None) -> int:
        return with_messages(lambda: parse_and_run(sys.argv[1:] if argv is None else list(argv), program))

    def parse_and_run(arguments: list[str], program: str | None) -> int:
        flags = parser()
        flags.prog = program or flags.prog
        args = flags.parse_args(arguments)
        untested = untested_line() if warns_of_versions else None
        if untested is not None:
            print(f"warning: {untested}", file=sys.stderr)
        return run(args)

    return main


def skip_unused_here(*, reads_media: bool = False) -> None:
    """Skip what libraries import and a conversion never uses: a third of a command's start.

    Args:
        reads_media: the command reads an image or audio clip as training does (--logits), and Energon imports more.
    """
    skip_unused_imports(*() if reads_media else UNUSED_IMPORTS_HERE)
