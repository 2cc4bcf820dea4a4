"""Required contents of a Hugging Face folder; read before slow imports, so that a wrong path ends at once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from llava_mcore.errors import ConversionError
from llava_mcore.files.hf_folder import HfFolder
from llava_mcore.files.json_files import read_object
from llava_mcore.files.weight_files import ADAPTER_CONFIG

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""ORGANIZATION/MODEL."""


def read_config(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json.

    Raises:
        ConversionError: there is none, or it is not a JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        if holds_adapter_only(folder):
            raise ConversionError(
                f"{folder} holds a PEFT adapter, not a model: write the whole model with export-hf --merge, or with "
                "PEFT's merge_and_unload"
            )
        if any(folder.glob("iter_*")) or (folder / "metadata.json").is_file():
            raise ConversionError(f"{folder} holds Megatron checkpoints: give it as --megatron-dir, or run export-hf")
        if not folder.exists() and HUB_NAME.fullmatch(str(folder)):
            raise ConversionError(
                f"{folder}: no config.json, because there is no such folder; if it is a model on the Hugging Face Hub, "
                f"download it with\nhf download {folder} --local-dir {folder.name}\nand give {folder.name}"
            )
        raise ConversionError(
            f"{folder}: no config.json; expected a folder of a vision-language model (build one with build_llava_jp.py)"
        )
    return read_object(path, ConversionError)


def holds_adapter_only(folder: Path) -> bool:
    """Return whether a folder holds a PEFT adapter and no model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def require_source(folder: Path) -> None:
    """Refuse a folder without a readable config.json or readable weights, from headers alone.

    Raises:
        ConversionError: what is missing or damaged.
    """
    read_config(folder)
    HfFolder.open(folder)
