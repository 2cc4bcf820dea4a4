"""Versions of what a product's rank has imported from."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the version of each package, or that it is missing."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found
