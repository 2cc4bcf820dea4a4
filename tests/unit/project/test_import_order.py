"""Every module can be imported first: on a machine without CUDA, `llava_mcore.parallel` comes before megatron.core."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.commands import ROOT

PACKAGE, PREPARES, MEGATRON = "llava_mcore", "llava_mcore.parallel", "megatron.core"


@functools.cache
def file_of(module: str) -> Path | None:
    """Return the file of one of our modules, None if it is a name inside of one."""
    path = ROOT.joinpath(*module.split("."))
    return next((x for x in (path / "__init__.py", path.with_suffix(".py")) if x.is_file()), None)


@functools.cache
def imported(file: Path) -> tuple[str, ...]:
    """Return what a file imports when it is imported, in order: modules, and names that may be modules."""
    return tuple(_imports(ast.parse(file.read_text(encoding="utf-8"))))


def _imports(block: ast.AST) -> Iterator[str]:
    """Yield the imports of a block and of the blocks inside it, except functions and what only type checkers read."""
    for node in ast.iter_child_nodes(block):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.stmt | ast.ExceptHandler) and not _is_run_later(node):
            yield from _imports(node)


def _is_run_later(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")


def is_late(module: str, loaded: set[str]) -> bool | None:
    """Follow the import of a module; return whether megatron.core comes first, None if neither comes.

    Args:
        loaded: modules that have been imported already; those that this one imports are added.
    """
    names = module.split(".")
    for parent in (".".join(names[: i + 1]) for i in range(len(names))):
        if parent == PREPARES:
            return False
        file = file_of(parent)
        if file is None or parent in loaded:
            continue
        loaded.add(parent)
        for name in imported(file):
            if name.split(".")[0] == PACKAGE:
                found = is_late(name, loaded)
            else:
                found = True if f"{name}.".startswith(f"{MEGATRON}.") else None
            if found is not None:
                return found
    return None


def test_every_module_can_be_imported_first() -> None:
    """Except those of `compat`, which say that they come after `llava_mcore.parallel`."""
    files = sorted(x for x in (ROOT / PACKAGE).rglob("*.py") if x.relative_to(ROOT / PACKAGE).parts[0] != "compat")
    modules = [".".join(x.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for x in files]
    found = {module: is_late(module, set()) for module in modules}
    assert False in found.values()
    assert not [module for module, late in found.items() if late], "begin with `import llava_mcore.parallel`"
