"""The files of a Hugging Face folder: which hold its weights, and which stand beside them. Without torch.

The weights are in the files that transformers reads, or nowhere if that is ambiguous. transformers reads, in this
order: the file that config.json names (transformers_weights), model.safetensors, the files of
model.safetensors.index.json. Other programs do not: vLLM prefers the index, and without one reads every safetensors
file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_mcore.errors import ConversionError, problems
from llava_mcore.files.regular import plain_name, read_object

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
EXPLICIT = "transformers_weights"
"""Key of config.json with the name of the weight file or of its index."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""ORGANIZATION/MODEL."""
_INDEX_END = ".safetensors.index.json"
_LISTED = 20  # names in one message
_NO_SUCH_FILE = (
    f"expected {SINGLE} or {INDEX} and its files (.bin weights are not read: save the model again with save_pretrained)"
)


@dataclass(frozen=True)
class WeightFiles:
    """The weight files of a folder.

    `files`: names. `index`: the file of each tensor, as the index says; empty without one. `ignored`: other safetensors
    files, or an index, which transformers does not read.
    """

    files: tuple[str, ...]
    index: Mapping[str, str]
    ignored: tuple[str, ...]


def has_weights(folder: Path) -> bool:
    """Return whether a folder has weights that could be read; `choose_weight_files` says which."""
    return any((folder / name).is_file() for name in (SINGLE, INDEX)) or _explicit(folder) is not None


def choose_weight_files(folder: Path) -> WeightFiles:
    """Return the weight files of a folder.

    Raises:
        ConversionError: there are none, their index is damaged, or programs would not agree on which they are: two
            copies of the weights, or an adapter beside them.
    """
    refuse_adapter(folder)
    name = _explicit(folder) or (SINGLE if (folder / SINGLE).exists() else INDEX)
    if not (folder / name).exists():
        raise ConversionError(f"{folder}: no weights that can be read; {_found_instead(folder) or _NO_SUCH_FILE}")
    index = read_index(folder / name) if name.endswith(_INDEX_END) else {}
    files = tuple(sorted(set(index.values()))) or (name,)
    others = [path.name for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith("adapter_")]
    if name == SINGLE and (folder / INDEX).is_file() and _second_copy(folder) != {SINGLE}:
        others.append(INDEX)
    return WeightFiles(files, index, tuple(x for x in others if x not in files))


def refuse_adapter(folder: Path) -> None:
    """Refuse a PEFT adapter in a folder of whole weights.

    Raises:
        ConversionError: transformers would read another model, with the adapter in it.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        return
    try:
        base = read_object(folder / ADAPTER_CONFIG, ConversionError).get("base_model_name_or_path")
    except ConversionError:
        base = None
    raise ConversionError(
        f"{folder} holds a model and also a PEFT adapter ({ADAPTER_CONFIG}): transformers would load "
        f"{base or 'the base model that it names'} with the adapter instead of these weights. Move adapter_config.json "
        "and adapter_model.* to a folder of their own, or, if the adapter belongs to the model, merge it with PEFT "
        "(merge_and_unload) and save that"
    )


def read_index(index: Path) -> dict[str, str]:
    """Return the file of each tensor. ConversionError if it is not an index of safetensors files in its folder."""
    try:
        files = dict(read_object(index, ConversionError)["weight_map"])
    except (ConversionError, ValueError, KeyError, TypeError) as error:
        raise ConversionError(f"{index}: not an index of weight files, copy it again ({error!r})") from error
    require_weight_files(files.values(), index)
    return files


def require_weight_files(names: Iterable[object], source: Path) -> None:
    """Refuse an index that names anything but safetensors files in its folder: they are read, and written by an export.

    Raises:
        ConversionError: lists every other name.
    """
    wrong = sorted({repr(name) for name in names if not plain_name(name) or not str(name).endswith(".safetensors")})
    if wrong:
        title = f"{source} names files that are not safetensors files in its folder"
        raise ConversionError(problems(title, wrong[:_LISTED]))


def write_index(folder: Path, files: Mapping[str, str], total_size: int) -> None:
    """Write the index of a folder with several weight files. `files`: tensor name to file name."""
    content = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(files.items()))}
    (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _explicit(folder: Path) -> str | None:
    """Return the file that config.json names, if it does. ConversionError if it is not a safetensors file there."""
    path = folder / "config.json"
    name = read_object(path, ConversionError).get(EXPLICIT) if path.is_file() else None
    if name is None:
        return None
    if not plain_name(name) or not str(name).endswith((".safetensors", _INDEX_END)):
        raise ConversionError(
            f"{path}: {EXPLICIT} is {name!r}, expected a safetensors file in the folder, or its index"
        )
    return str(name)


def _second_copy(folder: Path) -> set[str]:
    """Return the files of an index beside the single file. Some may be gone: it is a left-over.

    Raises:
        ConversionError: all are there, so that the folder has two copies of the weights, or the index is damaged.
    """
    files = set(read_index(folder / INDEX).values())
    if files - {SINGLE} and all((folder / name).is_file() for name in files):
        listed = ", ".join(sorted(files - {SINGLE})[:3])
        raise ConversionError(
            f"{folder} holds two copies of the weights: {SINGLE}, which transformers reads, and {INDEX} with its files "
            f"({listed}{', …' if len(files) > 3 else ''}), which vLLM reads. Keep one: delete {SINGLE}, or the index "
            "and its files"
        )
    return files


def _found_instead(folder: Path) -> str:
    """Return what a folder without readable weights has, and what to do about it; empty if nothing."""
    shards = sorted(path.name for path in folder.glob("model*.safetensors"))
    if shards:
        advice = f"rename it to {SINGLE}" if len(shards) == 1 else f"copy {INDEX} too"
        return f"{', '.join(shards[:3])}{', …' if len(shards) > 3 else ''} without an index of its files: {advice}"
    return ""


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
        download = hub_hint(folder)
        if download is not None:
            raise ConversionError(
                f"{folder}: no config.json, because there is no such folder; {download}\nand give {folder.name}"
            )
        raise ConversionError(
            f"{folder}: no config.json; expected a folder of a vision-language model, such as one that "
            "`python -m llava_mcore build` makes"
        )
    return read_object(path, ConversionError)


def hub_hint(folder: Path) -> str | None:
    """Return how to download a model, if a missing folder may be its name on the Hugging Face Hub; else None.

    Args:
        folder: as it was typed, or made absolute from the current folder.
    """
    here = Path.cwd()
    name = folder.relative_to(here) if folder.is_absolute() and folder.is_relative_to(here) else folder
    if folder.exists() or folder.parent.exists() or not HUB_NAME.fullmatch(str(name)):
        return None
    command = f"hf download {name} --local-dir {name.name}"
    return f"if it is a model on the Hugging Face Hub, download it with\n{command}"


def holds_adapter_only(folder: Path) -> bool:
    """Return whether a folder holds a PEFT adapter and no model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()
