"""Tiny LLaVAs as Hugging Face folders and as the checkpoints that are imported from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llava_mcore.convert.import_hf import import_hf
from tests.helpers.tiny_hf import make_hf_llava


def make_checkpoints(folder: Path, models: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Write folder/NAME/hf and folder/NAME/megatron of each model; return the checkpoints by name.

    models: by name, the arguments of `make_hf_llava`.
    """
    for name, options in models.items():
        make_hf_llava(hf_dir(folder, name), **options)
        import_hf(hf_dir(folder, name), folder / name / "megatron")
    return {name: str(folder / name / "megatron") for name in models}


def hf_dir(folder: Path, name: str) -> Path:
    """Return the Hugging Face folder of a model that `make_checkpoints` wrote."""
    return folder / name / "hf"
