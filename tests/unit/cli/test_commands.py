"""The table of commands agrees with the files, the scripts and the page about scripts."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from llava_mcore.cli.base.commands import COMMANDS

ROOT = Path(__file__).parents[3]
SCRIPTS = {command.script: name for name, command in COMMANDS.items() if command.script is not None}
SHARED = {"__init__", "prepare_bar"}


def test_every_file_is_a_command() -> None:
    files = {path.stem for path in (ROOT / "llava_mcore" / "cli").iterdir() if path.suffix == ".py"}
    assert sorted(files - SHARED) == sorted(command.file for command in COMMANDS.values())
    folders = {path.parent.name for path in (ROOT / "llava_mcore" / "cli").glob("*/*.py")}
    assert folders == {"base"}, "what commands share"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_declares_flags_and_runs(name: str) -> None:
    module = importlib.import_module(f"llava_mcore.cli.{COMMANDS[name].file}")
    assert callable(module.run) and callable(module.main)
    assert module.parser().format_help().startswith("usage: ")


def test_scripts_run_their_commands() -> None:
    for script, name in SCRIPTS.items():
        assert f'main(["{name}", *sys.argv[1:]])' in (ROOT / "scripts" / script).read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `(\S+\.py)` \| .* \| `python -m llava_mcore (\S+)` \|$",
        (ROOT / "scripts" / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert dict(rows) == SCRIPTS
    assert {str(path.relative_to(ROOT / "scripts")) for path in (ROOT / "scripts").rglob("*.py")} == SCRIPTS.keys()
