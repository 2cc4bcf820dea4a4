"""docs/extend/flag.md, followed literally on a copy of the package: its flags are in the help and act."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "extend" / "flag.md").read_text(encoding="utf-8")


def apply(diff: str, file: Path) -> None:
    """Add the lines with a plus after the lines before them, which the file must have."""
    lines = diff.splitlines()
    before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    text = file.read_text(encoding="utf-8")
    assert text.count(before) == 1, f"{file} has no such lines:\n{before}"
    file.write_text(text.replace(before, "\n".join(line[1:] for line in lines)), encoding="utf-8")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a copy of the package with the page's change of its one file."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "llava_mcore", folder / "llava_mcore", ignore=shutil.ignore_patterns("__pycache__"))
    (diff,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    (file,) = re.findall(r"`(llava_mcore/\S+\.py)`, and a flag that needs it", PAGE)
    apply(diff, folder / file)
    return folder


def run(copy: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command line of the page with the copy."""
    words = [sys.executable if word == "python" else word for word in command.split()]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"}
    return subprocess.run(words, cwd=copy, env=environment, capture_output=True, text=True, check=False)


def test_the_flags_are_in_the_help_and_in_the_page_of_flags(copy: Path) -> None:
    done = run(copy, "python -m llava_mcore train --help")
    assert "--label-smoothing X" in done.stdout and "--label-smoothing-iters N" in done.stdout, done.stderr
    assert "Probability that is spread over the whole vocabulary. (default: 0.0; key: training.label_smoothing)" in (
        " ".join(done.stdout.split())
    )
    (command,) = re.findall(r"^(python -m llava_mcore\.config\.flag_table) > docs/flags\.md$", PAGE, re.MULTILINE)
    rows = set(run(copy, command).stdout.splitlines()) - set((ROOT / "docs" / "flags.md").read_text().splitlines())
    names = "label_smoothing", "label_smoothing_iters"
    flags = [f"| `--{name.replace('_', '-')}` | `training.{name}` |" for name in names]
    needs = "| `--label-smoothing-iters` (`training.label_smoothing_iters`) | --label-smoothing |"
    assert sorted(row.startswith(tuple(flags)) or row == needs for row in rows) == [True] * 3


def test_the_flags_act_in_the_configuration(copy: Path) -> None:
    (command,) = re.findall(r"^python -m llava_mcore show-config .*$", PAGE, re.MULTILINE)
    assert "  label_smoothing: 0.1\n" in run(copy, command).stdout
    done = run(copy, command.replace("0.1", "1"))
    assert done.returncode == 2 and "(from --label-smoothing): found '1', expected less than 1" in done.stderr


def test_what_a_flag_needs_is_checked(copy: Path) -> None:
    done = run(copy, "python -m llava_mcore train --save-dir out --train-iters 1 -g 1 --label-smoothing-iters 5")
    assert done.returncode == 2
    assert "--label-smoothing-iters has no effect without --label-smoothing: add that, or omit" in done.stderr
