"""Energon 7.4.1 runs what a dataset names: any class or function of any module, and Python files of .nv-meta.

`dataset.yaml` and blends come with the data, so whoever made these could run commands here. Only energon's own kinds
of datasets, blends and samples may be named. Every name goes through one of the two functions that are replaced.
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
"""Classes that data may name, if energon exports them."""
REPLACED = {JsonParser: "_resolve_object", ModuleLoader: "_load_module"}


class NamedCodeError(DataError):
    """Data that name code which is not run."""


def run_no_named_code() -> None:
    """Let energon refuse names of code other than its own. Calling it again changes nothing.

    Raises AttributeError if energon has no such functions any more: another version may run named code elsewhere.
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
    found = vars(megatron.energon).get(object_name) if in_energon else None
    if inspect.isclass(found) and issubclass(found, KINDS):
        return found
    raise NamedCodeError(
        f"it names {module_name}.{object_name}, which could run anything; allowed are energon's own datasets, blends "
        "and samples, such as megatron.energon.CrudeWebdataset"
    )


def _refuse_file(self: ModuleLoader, path: Any) -> NoReturn:
    raise NamedCodeError(
        f"it names Python code, {path}, which is not run; use a field_map in dataset.yaml instead of sample_loader and "
        "part_filter, or prepare the data anew as CrudeWebdataset"
    )
