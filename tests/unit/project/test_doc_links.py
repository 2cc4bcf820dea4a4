"""Links of the documentation: every relative link and anchor resolves, and every page can be reached."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
STARTS = (ROOT / "README.md", ROOT / "docs" / "README.md")
PAGES = sorted((ROOT / "docs").rglob("*.md"))
OTHERS = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
READMES = [*ROOT.glob("examples/*/README.md"), *ROOT.glob("benchmarks/**/*.md")]
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)")
IMAGE = re.compile(r'<img src="(?!https?:)([^"]+)"')
NAMED_PAGE = re.compile(r"docs/[\w/]+\.md")


@cache
def prose(path: Path) -> str:
    """Return a page without its code blocks."""
    return FENCED.sub("", path.read_text(encoding="utf-8"))


@cache
def anchors(path: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, as GitHub and GitLab make them."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", prose(path), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        count = found.get(slug, 0)
        found[slug] = count + 1
        names.add(f"{slug}-{count}" if count else slug)
    return frozenset(names)


def links(path: Path) -> Iterator[tuple[Path, str]]:
    """Yield the file and the anchor of each relative link of a page."""
    text = re.sub(r"`[^`\n]*`", "", prose(path))
    for target in LINK.findall(text) + IMAGE.findall(text):
        name, _, anchor = target.partition("#")
        yield (path.parent / name).resolve() if name else path, anchor


@pytest.mark.parametrize("page", [*PAGES, *OTHERS, *READMES], ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_anchors_resolve(page: Path) -> None:
    broken = [f"{file.relative_to(ROOT)} does not exist" for file, _ in links(page) if not file.exists()]
    broken += [
        f"{file.relative_to(ROOT)} has no heading #{anchor}"
        for file, anchor in links(page)
        if anchor and file.suffix == ".md" and file.is_file() and anchor not in anchors(file)
    ]
    assert broken == []


def test_every_page_can_be_reached() -> None:
    reached: set[Path] = set()
    waiting = list(STARTS)
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            waiting += [file for file, _ in links(page) if file.suffix == ".md" and file.is_file()]
    assert [str(page.relative_to(ROOT)) for page in [*PAGES, *READMES] if page not in reached] == []


def test_pages_that_code_names_exist() -> None:
    """Messages, help texts and docstrings print paths of pages."""
    files = [file for folder in ("llava_mcore", "scripts", "examples") for file in (ROOT / folder).rglob("*.py")]
    named = {name for file in files for name in NAMED_PAGE.findall(file.read_text(encoding="utf-8"))}
    assert len(named) > 5
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []
