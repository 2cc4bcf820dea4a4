"""Writes a checkpoint's metadata: run.yaml, Hugging Face's files, the record of its adapters."""

from __future__ import annotations

import shutil
from pathlib import Path

from llava_mcore.adapters.adapter_record import write_record
from llava_mcore.checkpoint import layout
from llava_mcore.checkpoint.checksums import of_folder
from llava_mcore.checkpoint.layout import RUN_FILE
from llava_mcore.config.load import save_run_config
from llava_mcore.files.hf_files import is_weight_file
from llava_mcore.training.setup import Trainer


def write_description(trainer: Trainer, checkpoint: Path, hf_source: Path) -> dict[str, str]:
    """Write the metadata and return the checksums of the Hugging Face files, by path relative to the checkpoint.

    Args:
        hf_source: folder of these files.
    """
    hf, adapter_setup = layout.hf_folder(checkpoint), trainer.adapter_setup
    shutil.copytree(hf_source, hf, ignore=_without_weights if adapter_setup is None else _without_tensors)
    save_run_config(trainer.run, checkpoint / RUN_FILE)
    if adapter_setup is not None:
        write_record(checkpoint, adapter_setup.base, adapter_setup.plans, adapter_setup.layers)
    return {f"{hf.name}/{name}": text for name, text in of_folder(hf, {})["files"].items()}


def _without_weights(folder: str, names: list[str]) -> list[str]:
    """Return the weight files, which are not copied when a run started from a Hugging Face folder."""
    return [name for name in _without_tensors(folder, names) if name != layout.UNUSED]


def _without_tensors(folder: str, names: list[str]) -> list[str]:
    """Return all files of tensors: none is copied beside an adapter, whose base has them."""
    return [name for name in names if is_weight_file(Path(name))]
