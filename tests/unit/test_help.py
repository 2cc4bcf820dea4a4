"""--help and a mistyped flag of every command answer before anything heavy is imported."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from llava_mcore.__main__ import COMMANDS

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*/run.py"))
SCRIPTS = [*sorted((ROOT / "scripts").rglob("*.py")), *EXAMPLES]
EVERY = {
    **{name: ["-m", "llava_mcore", name] for name in COMMANDS},
    **{str(path.relative_to(ROOT)): [str(path)] for path in SCRIPTS},
}
HEAVY = re.compile(r"\|\s+(torch|transformers|megatron|numpy|pyarrow|matplotlib|PIL)$", re.MULTILINE)


@pytest.mark.parametrize("command", EVERY)
def test_help_is_quick(command: str) -> None:
    start = [sys.executable, "-X", "importtime", *EVERY[command]]
    for flag, code in (("--help", 0), ("--no-such-flag", 2)):
        done = subprocess.run([*start, flag], capture_output=True, text=True, cwd=ROOT, check=False)
        assert done.returncode == code, done.stderr[-500:]
        assert HEAVY.findall(done.stderr) == []
        assert code or "usage: " in done.stdout
        assert not code or "--no-such-flag" in done.stderr or "required" in done.stderr
