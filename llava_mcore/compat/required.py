"""Access to names of other packages that are patched or private, with an error at once if a name is missing."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from llava_mcore.compat.tested import installed_versions

_PACKAGES = {
    "megatron.core": "megatron-core",
    "megatron.energon": "megatron-energon",
    "torch": "torch",
    "transformer_engine": "transformer-engine",
    "transformers": "transformers",
}


def required(owner: object, name: str) -> Any:
    """Return an attribute of a module, a class or an object.

    Raises:
        AttributeError: it has no such attribute: llava_mcore was not written for this version of the package.
    """
    if not hasattr(owner, name):
        where = _where(owner)
        raise AttributeError(
            f"{where} has no {name!r}{_version_of(where)}: llava_mcore relies on it; install a version that "
            "pyproject.toml allows"
        )
    return getattr(owner, name)


def replace_name(owner: object, name: str, value: Any) -> None:
    """Set an attribute that exists; setting one that does not exist would have no effect.

    Raises:
        AttributeError: like `required`.
    """
    required(owner, name)
    setattr(owner, name, value)


def _where(owner: object) -> str:
    if isinstance(owner, ModuleType):
        return owner.__name__
    kind = owner if isinstance(owner, type) else type(owner)
    return f"{kind.__module__}.{kind.__qualname__}"


def _version_of(where: str) -> str:
    """Return " (package version)" if the module belongs to a package of `TESTED`, else ""."""
    for prefix, package in _PACKAGES.items():
        if where == prefix or where.startswith(f"{prefix}."):
            return f" ({package} {installed_versions().get(package, 'of an unknown version')})"
    return ""
