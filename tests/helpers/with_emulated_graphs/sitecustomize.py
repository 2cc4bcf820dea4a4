"""Lets processes with this folder on PYTHONPATH train with emulated graphs: Python imports this file at its start.

`--cuda-graphs` is refused without GPUs, so what it does is put in when its modules are imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

RULES, SETUP = "llava_mcore.config.rules.all_rules", "llava_mcore.training.setup"


class _Loader(importlib.abc.Loader):
    """Changes a module after it has been executed."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__name__ == RULES:
            module.loader_multiple = lambda run: run.data.seq_length  # type: ignore[attr-defined]
        else:
            from tests.helpers.emulated_graphs import use_in

            use_in(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the two modules that are changed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in (RULES, SETUP):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
