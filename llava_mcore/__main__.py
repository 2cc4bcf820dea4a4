"""`python -m llava_mcore COMMAND …`: run one of the commands."""

from __future__ import annotations

import difflib
import importlib
import os
import sys

from llava_mcore import log
from llava_mcore.compat.startup import find_distributions_lazily, skip_unused_imports
from llava_mcore.errors import FileError
from llava_mcore.launch.singularity import inner_command, requested_image, rerun_in_container
from llava_mcore.processes.control import INTERRUPTED, collect_rarely
from llava_mcore.processes.messages import with_messages

COMMANDS = {
    "build": ("build", "compose a Hugging Face folder from a language model and a vision tower"),
    "prepare": ("prepare", "write energon shards from conversations and pictures in any common format"),
    "import-hf": ("import_hf", "convert a Hugging Face folder to a Megatron checkpoint"),
    "train": ("train", "train; the same as scripts/train/run.py"),
    "export-hf": ("export_hf", "convert a Megatron checkpoint to a Hugging Face folder"),
    "generate": ("generate", "answer questions about pictures, from a Hugging Face folder or a Megatron checkpoint"),
    "chat": ("chat", "chat about pictures in the terminal, with a Hugging Face folder's model"),
    "evaluate": ("evaluate", "score models on a dataset, and on tasks of lm-eval and lmms-eval"),
    "serve": ("serve", "serve a Hugging Face folder with OpenAI's interface"),
    "demo": ("demo", "show a chat page for a model or a server"),
    "check": ("check", "check a checkpoint against its model, tensor by tensor"),
    "inspect": ("inspect_folder", "show the contents of a Hugging Face folder or a Megatron checkpoint"),
    "doctor": ("doctor", "check this machine: GPUs, versions, and one training step beside transformers"),
    "show-config": ("show_config", "print the configuration that results from flags, overrides and a file"),
}

ON_CPU = ("build", "prepare", "import-hf", "export-hf", "check", "inspect")
"""Commands that do not use GPUs."""

WITH_LIGHT_FLAGS = (
    "prepare",
    "import-hf",
    "export-hf",
    "generate",
    "chat",
    "evaluate",
    "serve",
    "demo",
    "check",
    "inspect",
)
"""Commands whose flags are in a separate module, because the command's own module needs torch."""

IN_CONTAINER = ("build", "prepare", "import-hf", "train", "export-hf", "generate", "chat", "check", "inspect", "doctor")
"""Commands that take --sif-path."""


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
    _require_current_folder()
    submits = name == "train" and "--submit" in arguments  # the job enters the image, not the process that submits it
    image = requested_image(arguments) if name in IN_CONTAINER and not submits else None
    if image is not None:
        # Before importing packages that may be in the image only.
        return rerun_in_container(image, inner_command(name, arguments[1:]), dry_run="--dry-run" in arguments)
    app = COMMANDS[name][0]
    if name in WITH_LIGHT_FLAGS:  # --help and a mistyped flag end here, before torch is imported
        importlib.import_module(f"llava_mcore.cli.flags.{app}").parser().parse_args(arguments[1:])
    log.quiet_libraries()
    find_distributions_lazily()
    if name == "train":  # this process only checks the run, then waits for the training processes
        skip_unused_imports("wandb")
    if name in ON_CPU or name == "train":
        collect_rarely()
    if name in ON_CPU:
        # These commands run on the CPU; a visible GPU would be initialized and occupied. Before torch is imported.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return importlib.import_module(f"llava_mcore.cli.{app}").main(arguments[1:])


def _require_current_folder() -> None:
    """Raise FileError if the current folder does not exist: relative paths and many libraries would fail."""
    try:
        os.getcwd()
    except OSError as error:
        raise FileError(
            f"the current folder: {error.strerror}; it was deleted or moved: cd to an existing folder"
        ) from error


def _usage() -> str:
    lines = [f"  {name:<12} {meaning}" for name, (_, meaning) in COMMANDS.items()]
    return "\n".join(
        ["usage: python -m llava_mcore COMMAND [--help] …", "", *lines, "", "COMMAND --help lists its flags."]
    )


if __name__ == "__main__":
    sys.exit(main())
