"""Energon 7.4.1 runs any code that a dataset names: classes and functions of any module, and Python files in .nv-meta.

`dataset.yaml` and blends come with the data, so whoever wrote them could run commands here. This patch allows only
energon's own datasets, blends and samples. Every name passes through one of the two functions that it replaces.
"""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

import megatron.energon
from megatron.energon import BaseCoreDatasetFactory, CrudeSample, DatasetLoaderInterface, Sample
from megatron.energon.module_loader import ModuleLoader
from megatron.energon.typed_converter import JsonParser

from llava_mcore.compat.required import required
from llava_mcore.errors import DataError

PACKAGE = "megatron.energon"
KINDS = (BaseCoreDatasetFactory, DatasetLoaderInterface, Sample, CrudeSample)
"""Classes that a dataset may name, if energon exports them."""
REPLACED = {JsonParser: "_resolve_object", ModuleLoader: "_load_module"}


class NamedCodeError(DataError):
    """A dataset names code, which is not run."""


def refuse_named_code() -> None:
    """Make energon refuse names of code other than its own. A second call changes nothing.

    Raises AttributeError if energon no longer has these functions: it may then run named code elsewhere.
    """
    for owner, name in REPLACED.items():
        required(owner, name)
        if not inspect.isfunction(inspect.getattr_static(owner, name)):
            raise AttributeError(f"{owner.__qualname__}.{name} is no function: energon has changed")
    JsonParser._resolve_object = _resolve
    ModuleLoader._load_module = _refuse_file


def _resolve(self: JsonParser, module_name: str, object_name: str, *how: Any, **more: Any) -> type:
    """Return one of energon's classes. NamedCodeError for everything else, before anything is imported."""
    in_energon = module_name == PACKAGE or str(module_name).startswith(f"{PACKAGE}.")
    kind = vars(megatron.energon).get(object_name) if in_energon else None
    if inspect.isclass(kind) and issubclass(kind, KINDS):
        return kind
    raise NamedCodeError(
        f"it names {module_name}.{object_name}, which could run anything; allowed are energon's own datasets, blends "
        "and samples, such as megatron.energon.CrudeWebdataset"
    )


def _refuse_file(self: ModuleLoader, path: Any) -> NoReturn:
    raise NamedCodeError(
        f"it names Python code, {path}, which is not run. Write shards of its json, txt and image parts instead: "
        "python -m llava_mcore prepare FOLDER --out SHARDS. Or, if question and answer are parts or fields of a json, "
        "use a field_map in dataset.yaml instead of sample_loader and part_filter"
    )
