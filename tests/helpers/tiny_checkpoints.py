"""Tiny models as Hugging Face folders and as the checkpoints that are imported from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from llava_mcore.convert.import_hf import import_hf


def make_checkpoints(folder: Path, makers: Mapping[str, Callable[[Path], object]]) -> dict[str, str]:
    """Write folder/NAME/hf and folder/NAME/megatron of each model; return the checkpoints by name.

    makers: what writes a model's Hugging Face folder, by name.
    """
    for name, make in makers.items():
        make(hf_dir(folder, name))
        import_hf(hf_dir(folder, name), folder / name / "megatron")
    return {name: str(folder / name / "megatron") for name in makers}


def hf_dir(folder: Path, name: str) -> Path:
    """Return the Hugging Face folder of a model that `make_checkpoints` wrote."""
    return folder / name / "hf"
