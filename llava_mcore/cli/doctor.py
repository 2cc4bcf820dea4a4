"""Check this machine: GPUs, libraries, versions, limits, and one training step beside transformers."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from dataclasses import asdict
from pathlib import Path

from llava_mcore.cli.base.entry import command_main
from llava_mcore.errors import ConfigError, problems


def parser() -> argparse.ArgumentParser:
    """Flags of `python -m llava_mcore doctor`."""
    p = argparse.ArgumentParser(
        prog="python -m llava_mcore doctor",
        allow_abbrev=False,
        description="Check whether this machine can train: GPUs, driver, libraries, package versions (compared with "
        "pyproject.toml), limits, tools, environment variables. Then train one step of a tiny random model on every "
        "GPU, or with two processes on the CPU, and compare it with transformers. Exit code 0: nothing is wrong; "
        "2: the last message lists every problem.",
    )
    p.add_argument("--no-self-test", action="store_true", help="omit the training step")
    p.add_argument("--json", action="store_true", help="print the table as JSON")
    p.add_argument("--sif-path", type=Path, help="run the same command inside this Singularity image")
    return p


def run(args: argparse.Namespace) -> int:
    """Print what this machine has, and return 0.

    Raises:
        ConfigError: lists everything that is wrong.
    """
    if importlib.util.find_spec("packaging") is None:
        raise ConfigError("versions cannot be compared without the package packaging: pip install packaging")
    from llava_mcore.doctor.examination import examine, self_test
    from llava_mcore.doctor.rows import problems_of, table

    examination = examine(os.environ)
    rows = list(examination.rows)
    if not args.json:
        print(table(rows), flush=True)
    if not args.no_self_test:
        tested = self_test(examination)
        rows += tested
        if not args.json:
            print("\n" + table(tested), flush=True)
    errors = problems_of(rows)
    if args.json:
        print(json.dumps({"ok": not errors, "problems": errors, "rows": [asdict(row) for row in rows]}, indent=2))
    if errors:
        raise ConfigError(problems("this machine is not ready", errors))
    return 0


main = command_main(parser, run)
