"""Leaves out what libraries import in vain. For processes that are ours from beginning to end."""

from __future__ import annotations

import sys

IN_VAIN = ("sklearn", "scipy")
"""transformers imports both wherever they are, as in NVIDIA's containers: for one way to generate, and losses of
object detection. A second and a half of every start."""


def leave_out_unused() -> None:
    """Let packages count as not installed, unless they have been imported already."""
    for name in IN_VAIN:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
