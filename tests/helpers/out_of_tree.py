"""Follows a page of docs/extend in a copy of the package: its code blocks are put where the page says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FUTURE = "from __future__ import annotations\n"


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a page of docs/extend."""
    text = (ROOT / "docs" / "extend" / page).read_text(encoding="utf-8")
    return [code for kind, code in BLOCK.findall(text) if kind == language]


class Copy:
    """A copy of the package, and the files of it that were touched."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.touched: set[str] = set()
        shutil.copytree(ROOT / "llava_mcore", folder / "llava_mcore")

    def write(self, name: str, text: str) -> None:
        self.touched.add(name)
        (self.folder / name).write_text(text, encoding="utf-8")

    def replace(self, name: str, before: str, after: str) -> None:
        """Replace what occurs once in a file."""
        text = (self.folder / name).read_text(encoding="utf-8")
        assert text.count(before) == 1, (name, before)
        self.write(name, text.replace(before, after))

    def add_imports(self, name: str, code: str) -> None:
        """Put imports at the top of a file."""
        self.replace(name, FUTURE, f"{FUTURE}\n{code}")

    def run(self, *arguments: str) -> str:
        """Run Python with the copy, and return what it prints."""
        env = {**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        ran = subprocess.run(
            [sys.executable, *arguments], cwd=self.folder, env=env, capture_output=True, text=True, timeout=600
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout
