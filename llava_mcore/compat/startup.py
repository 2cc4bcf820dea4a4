"""Makes processes start sooner: skips what libraries do at import and this process does not use.

Written for transformers 5.17 to 5.23 and megatron-core 0.19.2. With a version that imports others, the start is slower,
not wrong.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import sys
from collections.abc import Callable, Collection, Iterator, Mapping

UNUSED_IMPORTS = ("sklearn", "scipy", "accelerate")
"""transformers imports them if they are installed, as in NVIDIA's containers: for one way of generation, losses of
object detection, and models on several devices."""

SHARED = ("flash_attn",)
"""Modules of several distributions: FlashAttention 2 and 4."""

UNUSED_IMPORTS_HERE = ("wandb", "tensorboard", "multistorageclient")
"""megatron-core imports them if they are installed: to log its timers, and to read checkpoints in object stores. A
conversion does neither. They take as long as megatron-core itself."""


_READ = importlib.metadata.packages_distributions


def skip_unused_imports(*more: str, keep: Collection[str] = ()) -> None:
    """Make packages count as not installed, unless they have been imported already. This saves a second at every start.

    Only for processes that do not need them. A build, for example, needs accelerate to read a GGUF file.

    Args:
        more: packages besides `UNUSED_IMPORTS`.
        keep: those of `UNUSED_IMPORTS` that this process needs.
    """
    for name in (*UNUSED_IMPORTS, *more):
        if name not in keep:
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def find_distributions_lazily() -> None:
    """Replace `importlib.metadata.packages_distributions`, which transformers 5.17 calls when it is imported.

    It reads the file list of every installed package, which takes about a second. transformers then asks for few
    packages, most of which are distributed under their own name. transformers 5.23 itself looks for that first.
    """
    importlib.metadata.packages_distributions = lambda: Distributions(_READ)


class Distributions(Mapping[str, list[str]]):
    """Module -> names of the distributions that contain it; files are read when that is not its own name."""

    def __init__(self, read: Callable[[], Mapping[str, list[str]]]) -> None:
        self._read = functools.cache(read)

    def __getitem__(self, module: str) -> list[str]:
        if module not in SHARED:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                return [importlib.metadata.distribution(module).name]
        return list(self._read()[module])

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())
