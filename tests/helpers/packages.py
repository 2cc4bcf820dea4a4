"""Packages that some tests need and a machine may lack, such as one with GPUs and no network."""

from __future__ import annotations

from typing import Any

import pytest

SKIP_REASON = "needs the package "
"""Followed by the name of the package."""


def needs(package: str) -> Any:
    """Return a package; skip the calling test if it is not installed."""
    return pytest.importorskip(package, reason=SKIP_REASON + package)
