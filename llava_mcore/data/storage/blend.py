"""Reads the YAML files of a blend: which datasets it has, which part of each is read, and by which files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ryml
from megatron.energon import traverse_metadataset
from megatron.energon.epathlib import EPath
from megatron.energon.eyaml import load_yaml

from llava_mcore.compat.energon.named_code import NamedCodeError, refuse_named_code
from llava_mcore.errors import DataError

SPLIT = "train"
"""The part of the data to train on."""
NO_VALIDATION = (
    "create one (prepare --val-ratio 0.05, or a val section in a blend), or omit --eval-interval and --eval-generate"
)
URL_HINT = " (in a blend, paths in object stores begin with msc://, see docs/object_stores.md)"
BLEND_ERRORS = (
    AssertionError,
    AttributeError,
    ValueError,
    KeyError,
    TypeError,
    OSError,
    RecursionError,
    ryml.ExceptionBasic,
)
"""Errors that energon raises for a blend: it parses with ryml and checks with assertions and look-ups."""
WEIGHTED = ("blend", "datasets")
"""Keys of a list of datasets with weights, in the second and the first version of the format."""
NO_DATASETS = ("aux", "subflavors")
"""Keys of a blend's entry whose values may have a `path` that is not a dataset of the blend."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A dataset of a data path, and the part of it that is read. A blend may list a dataset several times."""

    path: EPath
    part: str
    """Name in split_parts."""
    split_file: str = "split.yaml"
    dataset_file: str = "dataset.yaml"
    """Files in .nv-meta; an entry of a blend may name others (`split_config`, `dataset_config`)."""

    @property
    def meta_files(self) -> tuple[str, ...]:
        """Names of the files in .nv-meta that determine which samples are read."""
        return "index.uuid", self.split_file, self.dataset_file


def read_blend(file: EPath, split: str) -> tuple[list[EPath], list[Leaf]]:
    """Return every YAML file that is opened for a split of a blend, the blend's own first, and its datasets.

    Raises:
        DataError: energon cannot read the blend, it has no such split, or its weights cannot be used.
    """
    refuse_named_code()
    try:
        traverse_metadataset(file, split_part=split)  # checks everything, also that no blend contains itself
        files: list[EPath] = []
        leaves = list(_leaves(file, split, files))
    except NamedCodeError as error:
        raise DataError(f"{file} is refused: {error}") from error
    except BLEND_ERRORS as error:
        if split != SPLIT and isinstance(error, KeyError):
            raise DataError(f"the blend {file} has no {split!r} section: {NO_VALIDATION}") from error
        hint = URL_HINT if "protocol" in str(error) else ""
        raise DataError(f"{file} is not a blend of datasets that energon can read: {error!r}{hint}") from error
    return files, leaves


def _leaves(file: EPath, split: str, files: list[EPath]) -> Iterator[Leaf]:
    """Yield the datasets of one YAML file and of those that it refers to; add these to `files`."""
    if file not in files:
        files.append(file)
    section = load_yaml(file.read_bytes())["splits"][split]
    _check_weights(file, section)
    for entry in _entries(section):
        path, part = file.parent / entry["path"], entry.get("split_part") or split
        if path.is_file() and path.name.endswith(".yaml"):
            yield from _leaves(path, part, files)
        else:
            names = {"split_file": entry.get("split_config"), "dataset_file": entry.get("dataset_config")}
            yield Leaf(path, part, **{field: name for field, name in names.items() if name})


def _check_weights(file: EPath, section: Any) -> None:
    """Raise DataError if a weight is negative or not finite, or all are 0; energon would divide by their sum."""
    listed = [section.get(key) for key in WEIGHTED] if isinstance(section, dict) else []
    weights = [entry.get("weight", 1) for entries in listed for entry in entries or ()]
    if weights and not (all(0 <= weight < float("inf") for weight in weights) and any(weights)):
        values = ", ".join(f"{weight:g}" for weight in weights)
        raise DataError(f"{file}: weights must be finite, at least 0, and not all 0, found {values}")


def _entries(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the entries with a path of a split: one, or those of a blend or join in either version of the format."""
    if isinstance(value, dict) and "path" in value:
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key not in NO_DATASETS:
                yield from _entries(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _entries(inner)
