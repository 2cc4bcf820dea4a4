"""Packages that some tests need and a machine may lack, such as one with GPUs and no network."""

from __future__ import annotations

from typing import Any

import pytest

WANTED = "needs the package "


def needs(package: str) -> Any:
    """Return a package; skip the test that calls this where it is not installed."""
    return pytest.importorskip(package, reason=WANTED + package)
