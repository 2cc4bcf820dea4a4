"""The files beside the weights of a Hugging Face folder, which a checkpoint carries and an export writes again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from llava_mcore.errors import ConversionError, problems
from llava_mcore.files.weight_files import ADAPTER_CONFIG

CONFIG = "config.json"
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""Files of a tokenizer, which has at least one of them."""
_WEIGHT_ENDS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".index.json")
_ADAPTER_WEIGHTS = "adapter_model."


def is_weight_file(path: Path) -> bool:
    """Return whether a file holds weights or their index, rather than config, tokenizer or processor."""
    return path.name.endswith(_WEIGHT_ENDS)


def is_companion(path: Path) -> bool:
    """Return whether a file belongs beside the weights: config, tokenizer, processor, templates, licenses.

    Weights do not, nor do the files of a PEFT adapter, with which transformers would take the folder for an adapter.
    """
    return (
        path.is_file()
        and not path.name.startswith(".")
        and not is_weight_file(path)
        and not path.name.startswith(_ADAPTER_WEIGHTS)
        and path.name != ADAPTER_CONFIG
    )


def companion_files(folder: Path) -> list[Path]:
    """Return a folder's companions."""
    return sorted(path for path in folder.iterdir() if is_companion(path))


def copy_companions(source: Path, target: Path, *, skip: Iterable[str] = ()) -> None:
    """Copy a folder's companions, byte for byte, except those of the names in `skip`."""
    copy_files({path.name: path for path in companion_files(source) if path.name not in skip}, target)


def copy_files(sources: Mapping[str, Path], target: Path) -> None:
    """Copy files to their names in a folder.

    Raises:
        ConversionError: a name is taken: what was written there first would be lost.
    """
    target.mkdir(parents=True, exist_ok=True)
    taken = [name for name in sources if (target / name).exists()]
    if taken:
        raise ConversionError(problems(f"{target}: files of these names were written before", taken))
    for name, path in sources.items():
        shutil.copyfile(path, target / name)


def require_own_files(folder: Path) -> None:
    """Refuse links and pipes among the Hugging Face files of a checkpoint: an export would copy what they point to.

    Nothing that writes a checkpoint creates any. A Hugging Face folder may have links: the hub's cache consists of
    them.

    Raises:
        ConversionError: lists them.
    """
    paths = sorted(folder.rglob("*"))
    wrong = [f"{path.name} is a link to {os.readlink(path)}" for path in paths if path.is_symlink()]
    wrong += [
        f"{path.name} is not a file" for path in paths if not (path.is_symlink() or path.is_file() or path.is_dir())
    ]
    if wrong:
        raise ConversionError(
            problems(f"{folder} may hold regular files only; copy them there if they belong to it", wrong)
        )
