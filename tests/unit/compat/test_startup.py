"""What makes a start quicker changes nothing that is found."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from llava_mcore.compat.startup import SHARED, Distributions, find_distributions_lazily
from tests.helpers.photos import CHINA
from tests.helpers.tiny_hf import make_hf_llava

READS = """
import importlib.metadata

read = importlib.metadata.packages_distributions
reads = []
importlib.metadata.packages_distributions = lambda: reads.append(0) or read()
from llava_mcore.compat.startup import find_distributions_lazily

find_distributions_lazily()
import transformers.utils.import_utils as imported

used = hasattr(imported, "PACKAGE_DISTRIBUTION_MAPPING")
print(len(reads), imported.is_torch_available(), used)
"""


def test_distributions_are_those_of_importlib() -> None:
    read = importlib.metadata.packages_distributions()
    lazy = Distributions(importlib.metadata.packages_distributions)
    assert {name: set(lazy[name]) for name in read} == {name: set(found) for name, found in read.items()}
    assert lazy.get("of_nobody", []) == [] and len(lazy) == len(read) and set(lazy) == set(read)


def test_modules_of_several_distributions_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    (module,) = SHARED
    both = Distributions(lambda: {module: ["flash-attn", "flash-attn-4"]})
    monkeypatch.setattr(importlib.metadata, "distribution", pytest.fail)
    assert both[module] == ["flash-attn", "flash-attn-4"]


def test_it_may_be_replaced_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = importlib.metadata.packages_distributions()
    monkeypatch.setattr(importlib.metadata, "packages_distributions", importlib.metadata.packages_distributions)
    find_distributions_lazily()
    find_distributions_lazily()
    assert set(importlib.metadata.packages_distributions()) == set(expected)


def test_importing_transformers_reads_no_lists_of_files() -> None:
    """Once the oldest version that pyproject.toml allows does not, the function can go."""
    done = subprocess.run([sys.executable, "-c", READS], capture_output=True, text=True, check=True)
    reads, has_torch, used = done.stdout.split()
    assert (reads, has_torch) == ("0", "True")
    assert (used == "True") == (Version(importlib.metadata.version("transformers")) < Version("5.23"))


def test_logits_are_compared_in_a_new_process(tmp_path: Path) -> None:
    """Of what a conversion skips, Energon needs something; in this process it has been imported already."""
    make_hf_llava(tmp_path / "hf")
    folders = ["--hf-dir", str(tmp_path / "hf"), "--megatron-dir", str(tmp_path / "m")]
    for command, picture, code, expected in (
        ("import-hf", str(CHINA), 0, "computes the logits of"),
        ("check", str(tmp_path / "none.jpg"), 2, "error: "),
    ):
        line = [sys.executable, "-m", "llava_mcore", command, *folders, "--logits", picture]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        text = done.stdout + done.stderr
        assert done.returncode == code and expected in text and "Traceback" not in text, text
