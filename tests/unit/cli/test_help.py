"""--help and a mistyped flag of every command answer before anything heavy is imported."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.startup import start, write_folders
from llava_mcore.cli.base.commands import COMMANDS
from llava_mcore.compat.startup import UNUSED_IMPORTS, UNUSED_IMPORTS_HERE
from llava_mcore.config.flags import ALL_FLAGS

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*/run.py"))
SCRIPTS = [*sorted((ROOT / "scripts").rglob("*.py")), *EXAMPLES]
EVERY = {
    **{name: ["-m", "llava_mcore", name] for name in COMMANDS},
    **{str(path.relative_to(ROOT)): [str(path)] for path in SCRIPTS},
}
HEAVY = re.compile(
    r"\|\s+(torch|torchvision|transformers|megatron|numpy|pandas|scipy|pyarrow|matplotlib|PIL|wandb)$", re.MULTILINE
)
READERS = ("import-hf", "export-hf", "check --hf-dir", "check --megatron-dir")


def typed(command: str) -> str:
    """The program in the usage: a script's file name, or the module and the command."""
    return f"python -m llava_mcore {command}" if command in COMMANDS else Path(command).name


@pytest.mark.parametrize("command", EVERY)
def test_help_is_quick(command: str) -> None:
    start = [sys.executable, "-X", "importtime", *EVERY[command]]
    for flag, code in (("--help", 0), ("--no-such-flag", 2)):
        done = subprocess.run([*start, flag], capture_output=True, text=True, cwd=ROOT, check=False)
        assert done.returncode == code, done.stderr[-500:]
        assert HEAVY.findall(done.stderr) == []
        assert code or done.stdout.startswith(f"usage: {typed(command)} "), done.stdout[:100]
        assert not code or "--no-such-flag" in done.stderr or "required" in done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_the_usage_is_short_and_names_what_is_required(name: str) -> None:
    """--help begins with what a command needs, not with a list of its flags."""
    parser = importlib.import_module(f"llava_mcore.cli.{COMMANDS[name].file}").parser()
    usage = parser.format_usage()
    assert usage.count("\n") <= 4 and len(" ".join(usage.split())) <= 160, usage
    for action in parser._actions:
        if action.required:
            words = action.option_strings or [action.metavar or action.dest]
            assert any(word in usage for word in words), (words, usage)
    flags = {word for action in parser._actions for word in action.option_strings}
    assert set(re.findall(r"--[\w-]+", usage)) <= flags, "the usage names a flag that does not exist"


@pytest.mark.parametrize("name", ["plan", "show-config"])
def test_commands_that_take_a_runs_flags_refer_to_train(name: str) -> None:
    parser = importlib.import_module(f"llava_mcore.cli.{COMMANDS[name].file}").parser()
    lines = parser.format_help().splitlines()
    assert len(lines) < 50 and "python -m llava_mcore train --help lists them" in " ".join(" ".join(lines).split())
    listed = {line.split()[0] for line in lines if line.startswith("  -")}
    assert listed >= {"--config"} and not listed & {name for flag in ALL_FLAGS for name in flag.names}
    assert vars(parser.parse_args(["--tp", "2"]))["parallel.tensor_model_parallel_size"] == "2"


@pytest.mark.parametrize("name", READERS)
def test_a_folder_is_read_before_the_imports_that_take_seconds(name: str, tmp_path: Path) -> None:
    command, folder = write_folders(tmp_path)[name]
    first = start(command, folder)
    assert first.modules.isdisjoint(
        {"transformers", "megatron", "torchvision", "accelerate", "pandas", "scipy", "pyarrow", "matplotlib", "wandb"}
    )


def test_nothing_is_imported_in_vain(tmp_path: Path) -> None:
    command, _ = write_folders(tmp_path)["import-hf"]
    whole = start(command)
    assert {"torch", "transformers", "megatron"} <= whole.modules, "it ended before its imports"
    assert whole.modules.isdisjoint({*UNUSED_IMPORTS, *UNUSED_IMPORTS_HERE, "pandas", "matplotlib"})
