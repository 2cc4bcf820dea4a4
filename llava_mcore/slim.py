"""Leaves out what libraries import in vain. For processes that are ours from beginning to end."""

from __future__ import annotations

import sys

IN_VAIN = ("sklearn", "scipy", "accelerate")
"""transformers imports them wherever they are, as in NVIDIA's containers: for one way to generate, losses of object
detection, and models that are spread over devices."""


def leave_out_unused(*more: str) -> None:
    """Let packages count as not installed, unless they have been imported already: over a second of every start."""
    for name in (*IN_VAIN, *more):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
