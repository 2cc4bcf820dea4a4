"""Flags of `evaluate`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from llava_mcore.cli.flags.conversion import BASE_DIR_HELP, DTYPE_NAMES
from llava_mcore.cli.flags.generate import SPLITS, add_answer_flags
from llava_mcore.cli.flags.samples import positive


def parser() -> argparse.ArgumentParser:
    """Flags of `python -m llava_mcore evaluate`; None: not given. `with_defaults` sets the defaults."""
    p = argparse.ArgumentParser(
        prog="python -m llava_mcore evaluate",
        allow_abbrev=False,
        description="Score models side by side: on a split of a prepared dataset (exact match, ANLS, ROUGE, BLEU, "
        "CIDEr), on tasks of lm-eval, and on tasks of lmms-eval.",
    )
    p.add_argument("--json", type=Path, metavar="FILE", help="write all scores, and every answer with its scores")
    models = p.add_argument_group("models; both flags may be repeated")
    models.add_argument("--hf-dir", type=Path, action="append", default=[], help="Hugging Face folder")
    models.add_argument("--megatron-dir", type=Path, action="append", default=[], help="Megatron checkpoint; no tasks")
    models.add_argument("--base-dir", type=Path, metavar="DIR", help=BASE_DIR_HELP)
    models.add_argument("--tp", type=positive, metavar="N", help="tensor-parallel size (default 1)")
    models.add_argument("--pp", type=positive, metavar="N", help="pipeline-parallel size (default 1)")
    models.add_argument("--dtype", choices=DTYPE_NAMES, help="dtype in memory (default: that of config.json)")
    models.add_argument(
        "--batch-size", type=positive, metavar="N",
        help="questions that a Megatron checkpoint or lm-eval answers at the same time (default 1)",
    )  # fmt: skip
    data = p.add_argument_group("a dataset")
    data.add_argument("--data-path", help="prepared folder or a blend's .yaml")
    data.add_argument("--split", choices=SPLITS, help="split (default val)")
    data.add_argument(
        "--every-answer", action="store_const", const=True,
        help="ask for every answer of a conversation, after the true answers before it (default: for the last one)",
    )  # fmt: skip
    tasks = p.add_argument_group("tasks, for Hugging Face folders; task files can execute code")
    tasks.add_argument("--tasks", type=_names, default=(), metavar="NAME[,NAME]", help="tasks of lm-eval")
    tasks.add_argument("--lmms-tasks", type=_names, default=(), metavar="NAME[,NAME]", help="tasks of lmms-eval")
    tasks.add_argument("--lmms-python", type=Path, metavar="PYTHON", help="Python of an environment with lmms-eval")
    tasks.add_argument(
        "--include-path", type=Path, action="append", default=[], metavar="DIR",
        help="folder with task files of your own; may be repeated",
    )  # fmt: skip
    p.add_argument(
        "--num-samples", type=positive, metavar="N",
        help="ask N questions of the dataset, evenly distributed, and the first N of each task (default: all)",
    )  # fmt: skip
    add_answer_flags(p, "answers to the dataset's questions")
    p.set_defaults(**dict.fromkeys(answer_defaults()))
    return p


def answer_defaults() -> dict[str, Any]:
    """Return the flags that only --data-path reads, with their defaults."""
    defaults_parser = argparse.ArgumentParser()
    add_answer_flags(defaults_parser)
    return {"split": "val", "every_answer": False} | vars(defaults_parser.parse_args([]))


def with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """Return the flags with the defaults of those that were not given."""
    defaults = answer_defaults() | {"tp": 1, "pp": 1, "batch_size": 1}
    absent = {name: value for name, value in defaults.items() if vars(args)[name] is None}
    return argparse.Namespace(**(vars(args) | absent))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)
