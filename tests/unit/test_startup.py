"""What makes a start quicker changes nothing that is found."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest
from packaging.version import Version

from llava_mcore.compat.startup import SHARED, Distributions, find_distributions_lazily

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
