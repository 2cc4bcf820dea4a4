"""Leaves out what libraries import in vain. For processes that train and do nothing else.

Written for transformers 5.17 to 5.23 and megatron-core 0.19.2. A version that imports others is slower, not wrong.
"""

from __future__ import annotations

import sys

IN_VAIN = ("sklearn", "scipy", "accelerate")
"""transformers imports them wherever they are, as in NVIDIA's containers: for one way to generate, losses of object
detection, and models that are spread over devices."""


def leave_out_unused(*more: str) -> None:
    """Let packages count as not installed, unless they have been imported already: a second of every start.

    Only where nothing asks for them. A build, for one, needs accelerate to read a GGUF file.
    """
    for name in (*IN_VAIN, *more):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
