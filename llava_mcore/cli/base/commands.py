"""The table of commands. A new one is a file in `cli/`, with `parser()`, `run()` and `main`, and a row here.

This file imports nothing: a host that only starts containers may lack the packages that commands need.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One command: `python -m llava_mcore NAME`."""

    name: str
    file: str
    """Module in `cli/`."""
    summary: str
    """Line in the usage."""
    script: str | None = None
    """File under scripts/ that runs it."""
    uses_gpus: bool = True
    has_image: bool = False
    """Takes --sif-path, to run inside a container."""


_ROWS = (
    Command(
        "build",
        "build",
        "compose a Hugging Face folder from a language model and a vision tower",
        script="convert/build_llava_jp.py",
        uses_gpus=False,
        has_image=True,
    ),
    Command(
        "prepare",
        "prepare",
        "write energon shards from conversations and images in any common format",
        script="data/prepare.py",
        uses_gpus=False,
        has_image=True,
    ),
    Command(
        "import-hf",
        "import_hf",
        "convert a Hugging Face folder to a Megatron checkpoint",
        script="convert/convert_hf_to_megatron.py",
        uses_gpus=False,
        has_image=True,
    ),
    Command("train", "train", "train; the same as scripts/train/run.py", script="train/run.py", has_image=True),
    Command(
        "export-hf",
        "export_hf",
        "convert a Megatron checkpoint to a Hugging Face folder",
        script="convert/convert_megatron_to_hf.py",
        uses_gpus=False,
        has_image=True,
    ),
    Command(
        "generate",
        "generate",
        "answer questions about images, from a Hugging Face folder or a Megatron checkpoint",
        has_image=True,
    ),
    Command("chat", "chat", "chat about images in the terminal, with a Hugging Face folder's model", has_image=True),
    Command("evaluate", "evaluate", "score models on a dataset, and on tasks of lm-eval and lmms-eval"),
    Command("serve", "serve", "serve a Hugging Face folder with OpenAI's interface"),
    Command("demo", "demo", "show a chat page for a model or a server"),
    Command(
        "check",
        "check",
        "check a checkpoint against its model, or a dataset as training will read it",
        uses_gpus=False,
        has_image=True,
    ),
    Command(
        "dedup",
        "dedup",
        "find samples that occur twice, or that an evaluation set has too",
        uses_gpus=False,
    ),
    Command(
        "inspect",
        "inspect_folder",
        "show the contents of a Hugging Face folder or a Megatron checkpoint",
        uses_gpus=False,
        has_image=True,
    ),
    Command(
        "doctor",
        "doctor",
        "check this machine: GPUs, versions, and one training step beside transformers",
        has_image=True,
    ),
    Command(
        "plan",
        "plan",
        "predict memory and time of a run, and find the layout, before it is launched",
    ),
    Command("show-config", "show_config", "print the configuration that results from flags, overrides and a file"),
)
COMMANDS = {command.name: command for command in _ROWS}
"""Name -> command, in the order of the usage."""
