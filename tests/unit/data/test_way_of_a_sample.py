"""The drawing of a sample's way, in the docstring of llava_mcore.data, names files and types that exist."""

from __future__ import annotations

import ast
import re

from tests.helpers.pages import ROOT

PACKAGE = ROOT / "llava_mcore"
DRAWING = ast.get_docstring(ast.parse((PACKAGE / "data" / "__init__.py").read_text())) or ""


def test_its_files_exist() -> None:
    files = re.findall(r"[\w/]+\.py\b", DRAWING)
    assert len(files) > 15
    assert not [x for x in files if not ((PACKAGE / "data" / x).is_file() or (PACKAGE / x).is_file())]


def test_its_types_exist() -> None:
    types = set(re.findall(r"\| ([A-Z]\w+):", DRAWING))
    assert types == {"ChatSample", "TokenSample", "EncodedSample", "Batch", "MicroBatch"}
    sources = (PACKAGE / "data" / "samples.py", PACKAGE / "parallel" / "batch.py")
    classes = {x.name for path in sources for x in ast.parse(path.read_text()).body if isinstance(x, ast.ClassDef)}
    assert types <= classes
