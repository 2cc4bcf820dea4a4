"""The pages for contributors name what there is: packages, files, decisions, the release."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import llava_mcore

ROOT = Path(__file__).parents[3]
DECISIONS = ROOT / "docs" / "decisions"
READMES = [f"{folder}/README.md" for folder in ("benchmarks", "environments", "examples", "scripts", "tests")]
PAGES = ["CONTRIBUTING.md", "SECURITY.md", *READMES, *(f"docs/decisions/{x.name}" for x in DECISIONS.glob("*.md"))]
FOLDERS = "llava_mcore|tests|environments|benchmarks|examples|scripts|docs"
HEADINGS = ["## Context", "## Decision", "## Consequences", "## Where"]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def first_cells(text: str) -> list[str]:
    """Return the first cell of each row of a page's tables, without code marks."""
    return re.findall(r"^\| `?([^|`]+?)`? +\|", text, re.MULTILINE)


def test_the_tour_names_every_package() -> None:
    packages = {path.parent.name for path in (ROOT / "llava_mcore").glob("*/__init__.py")}
    assert {cell.rstrip("/") for cell in first_cells(read("CONTRIBUTING.md")) if cell.endswith("/")} == packages


def test_decisions_are_listed_and_alike() -> None:
    pages = {path.name: path.read_text(encoding="utf-8") for path in DECISIONS.glob("*.md")}
    index = pages.pop("README.md")
    assert sorted(re.findall(r"^\| \[(\w+\.md)\]\(\1\) \|", index, re.MULTILINE)) == sorted(pages)
    for name, text in pages.items():
        assert re.findall(r"^## .*", text, re.MULTILINE) == HEADINGS, name


@pytest.mark.parametrize("name", PAGES)
def test_files_and_links_exist(name: str) -> None:
    text, folder = read(name), (ROOT / name).parent
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (folder / target).exists(), target
    for path in re.findall(rf"`((?:{FOLDERS})/[\w./-]*\w/?)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("name", READMES)
def test_folders_list_what_they_have(name: str) -> None:
    """A row that begins with a file or folder names one that exists there."""
    for cell in first_cells(read(name)):
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", cell) and ("/" in cell or "." in cell):
            assert (ROOT / name).parent.joinpath(cell).exists(), cell


def test_the_release_has_one_version_and_date() -> None:
    """pyproject.toml takes the version from the package."""
    dynamic = tomllib.loads(read("pyproject.toml"))["tool"]["setuptools"]["dynamic"]
    assert dynamic["version"] == {"attr": "llava_mcore.__version__"}
    citation = yaml.safe_load(read("CITATION.cff"))
    newest = re.search(r"^## \[([\d.]+)\] - ([\d-]+)$", read("CHANGELOG.md"), re.MULTILINE)
    assert newest is not None
    assert (citation["version"], str(citation["date-released"])) == newest.groups()
    assert llava_mcore.__version__ == newest[1]


def test_forms_and_the_workflow_are_yaml() -> None:
    files = sorted((ROOT / ".github").rglob("*.yml"))
    assert all(isinstance(yaml.safe_load(file.read_text(encoding="utf-8")), dict) for file in files) and len(files) == 4
    steps = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"]["test-all"]["steps"]
    assert steps[-1]["run"] == ".ci/run"
