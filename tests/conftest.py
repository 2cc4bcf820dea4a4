"""What all tests share."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# Tests make all they need: looking for a model on a hub is a mistake, and must not wait for a time-out.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shared two-core machine has pauses: time is no sign of a fault. Failures must be the same everywhere.
settings.register_profile("default", deadline=None, derandomize=True)
settings.load_profile("default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no GPU"))
