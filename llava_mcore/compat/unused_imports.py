"""Skips imports of libraries that training does not use.

Written for transformers 5.17 to 5.23 and megatron-core 0.19.2. With a version that imports others, the start is slower,
not wrong.
"""

from __future__ import annotations

import sys

IN_VAIN = ("sklearn", "scipy", "accelerate")
"""transformers imports them if they are installed, as in NVIDIA's containers: for one way of generation, losses of
object
detection, and models on several devices."""

IN_VAIN_HERE = ("wandb", "tensorboard", "multistorageclient")
"""megatron-core imports them if they are installed: to log its timers, and to read checkpoints in object stores. A
conversion does neither. They take as long as megatron-core itself."""


def skip_unused_imports(*more: str) -> None:
    """Make packages count as not installed, unless they have been imported already. This saves a second at every start.

    Only for processes that do not need them. A build, for example, needs accelerate to read a GGUF file.
    """
    for name in (*IN_VAIN, *more):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
