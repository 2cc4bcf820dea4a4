"""Code blocks of documentation pages, to be followed literally."""

from __future__ import annotations
import __future__

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Block:
    """A block of Python. `file`: where its first line says that the code goes."""

    file: str
    code: str

    def run(self, names: dict[str, Any]) -> dict[str, Any]:
        """Execute it among `names`, and return these."""
        # Annotations are left as text, as in a file of the library.
        exec(compile(self.code, self.file, "exec", __future__.annotations.compiler_flag), names)
        return names


def blocks(page: str) -> list[Block]:
    """Return the Python blocks of docs/extend/`page`."""
    text = (ROOT / "docs" / "extend" / page).read_text(encoding="utf-8")
    found = re.findall(r"^```python\n# ([^\n]+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [Block(file, code) for file, code in found]


def files(page: str) -> set[str]:
    """Return the library files into which the blocks of a page go."""
    return {name for block in blocks(page) for name in re.findall(r"^llava_mcore/[\w/]+\.py", block.file)}
