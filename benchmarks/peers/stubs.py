"""Stand-ins for packages that a product imports at the top of its files and does not use in a measured run.

`install("openai")` makes `import openai.anything` work where openai is missing: every name in it is a class, and
making an object of that class raises.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def _logger() -> logging.Logger:
    logger = logging.getLogger("modelscope")
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
    return logger


_CACHE = Path(tempfile.gettempdir()) / "modelscope"
_VALUES: Mapping[str, Mapping[str, Any]] = {
    "modelscope": {"__version__": "1.40.2", "check_local_model_is_latest": lambda *_, **__: True},
    "modelscope.hub.constants": {"API_HTTP_CLIENT_TIMEOUT": 60},
    "modelscope.hub.utils.utils": {"get_cache_dir": lambda model_id=None: str(_CACHE / (model_id or ""))},
    "modelscope.utils.config_ds": {"MS_CACHE_HOME": _CACHE},
    "modelscope.utils.logger": {"get_logger": lambda *_, **__: _logger()},
    "transformer_engine": {"__version__": "2.14.0"},
    "hydra": {"main": lambda **_: lambda function: function},
}
"""Names that are read while files are imported, by module."""


class _Stub(type):
    """The class of stubs, whose attributes are stubs too; one can be used in `A | B` of an annotation."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stub(f"{cls.__qualname__}.{name}")

    def __or__(cls, other: object) -> Any:
        return cls

    def __ror__(cls, other: object) -> Any:
        return cls


def _stub(name: str) -> type:
    def refuse(self: object, *_: object, **__: object) -> None:
        if type(self).__module__ == __name__:  # not a class of the product that inherits from a stub
            raise RuntimeError(f"{name} is a stand-in for a package that is not installed; the run needs the package")

    return _Stub(name.rpartition(".")[2], (), {"__init__": refuse, "__module__": __name__, "__qualname__": name})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        value = "0.0.0" if name == "__version__" else _stub(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find every module of the packages."""
        known = fullname.partition(".")[0] in self._packages
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return an empty module, with the names that files need while they are imported."""
        module = _Module(spec.name)
        module.__path__ = []
        for name, value in _VALUES.get(spec.name, {}).items():
            setattr(module, name, value)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave the module as it is."""


INSTALLED: list[str] = []
"""Packages that this process has stand-ins for."""
FOR_CHILDREN = "PEER_STAND_INS"
"""Environment variable: packages of `write_start`, separated by commas."""


def install(*packages: str) -> None:
    """Make those of the packages importable that are missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_Finder(missing))
    INSTALLED.extend(missing)


def write_start(folder: Path) -> None:
    """Write a sitecustomize.py into a folder for PYTHONPATH: each Python that starts installs those of FOR_CHILDREN.

    Processes that a product spawns for its data need them too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = f"import os\n\nfrom {__name__} import install\n\ninstall(*os.environ['{FOR_CHILDREN}'].split(','))\n"
    (folder / "sitecustomize.py").write_text(text, encoding="utf-8")
