"""mkdocs.yml lists every page of docs/ once, in the order of docs/README.md; docs/api.md lists every public name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import llava_mcore
from llava_mcore import errors

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
LINK = re.compile(r"\]\(([^)\s#]+\.md)")


class Loader(yaml.SafeLoader):
    """Reads the name of a Python function as a string."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
CONFIG = yaml.load(TEXT, Loader)


def pages(entries: list[Any]) -> Iterator[str]:
    """Yield the pages of a navigation, section by section."""
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        else:
            for section in entry.values():
                yield from pages(section)


NAV = list(pages(CONFIG["nav"]))


def test_the_navigation_has_every_page_once() -> None:
    docs = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))
    assert sorted(page for page in NAV if page.startswith("docs/")) == docs, "list the page under nav in mkdocs.yml"
    assert len(NAV) == len(set(NAV))
    assert [page for page in NAV if not (ROOT / page).is_file()] == []


def test_the_navigation_has_the_order_of_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    listed = [str((ROOT / "docs" / target).resolve().relative_to(ROOT)) for target in LINK.findall(index)]
    assert [page for page in NAV if page in listed] == listed


def test_nothing_comes_from_the_network() -> None:
    assert CONFIG["theme"]["font"] is False
    assert "offline" in CONFIG["plugins"] and "://" not in re.sub(r"^ *#.*", "", TEXT, flags=re.MULTILINE)
    for file in [*CONFIG["extra"]["polyfills"], *CONFIG["extra_css"]]:
        assert (ROOT / file).is_file(), file


def test_the_api_page_has_every_public_name() -> None:
    names = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    functions = {f"llava_mcore.{name}" for name in llava_mcore.__all__}
    classes = {f"{x.__module__}.{x.__name__}" for x in vars(errors).values() if isinstance(x, type)}
    assert functions <= set(names)
    assert {name for name in classes if name.startswith("llava_mcore.")} <= set(names)
    assert len(names) == len(set(names))
