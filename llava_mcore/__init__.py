"""Megatron-Core based 3D-parallel training of vision-language models.

The functions do what the commands do (docs/library.md). Each is imported on first use, because torch takes seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llava_mcore.convert.export_hf import export_hf
    from llava_mcore.convert.import_hf import import_hf
    from llava_mcore.convert.inputs import model_inputs
    from llava_mcore.convert.load_model import load_model
    from llava_mcore.launch.start import train

__version__ = "0.1.0"
__all__ = ["export_hf", "import_hf", "load_model", "model_inputs", "train"]

_MODULES = {
    "export_hf": "llava_mcore.convert.export_hf",
    "import_hf": "llava_mcore.convert.import_hf",
    "load_model": "llava_mcore.convert.load_model",
    "model_inputs": "llava_mcore.convert.inputs",
    "train": "llava_mcore.launch.start",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
