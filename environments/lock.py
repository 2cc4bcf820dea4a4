"""Print the installed version of everything that the project needs, as constraints for pip: `lock.py TARGET`.

TARGET is the target of the Makefile that runs it, for the lock's first line. The requirements in pyproject.toml are
followed through the installed packages, so that what merely happens to be in the environment does not get in.
"""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TITLES = {"lock": "The tested CPU stack", "lock-newest": "The newest tested CPU stack"}
EXTRAS = ("dev", "mlflow", "quickstart", "remote")
"""Extras of the project that the CPU stack has; `gpu` has a lock of its own."""


def main() -> int:
    """Print the lock; return 1 and name what is missing if the environment is not complete."""
    target = sys.argv[1]
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(text for extra in EXTRAS for text in project["optional-dependencies"][extra])]
    found, missing = closure(wanted, own=canonicalize_name(project["name"]))
    if missing:
        print(f"not installed: {', '.join(sorted(missing))}", file=sys.stderr)
        return 1
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    print(f"# {TITLES[target]}, {python}; made by `make {target}`.")
    for name in sorted(found):
        print(f"{name}=={found[name]}")
    return 0


def closure(requirements: list[str], own: str) -> tuple[dict[str, str], set[str]]:
    """Return (name -> installed version) of requirements and of theirs, and the names that are not installed."""
    found: dict[str, str] = {}
    missing: set[str] = set()
    seen: set[tuple[str, str]] = set()
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        requirement, asked_as = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name == own or (requirement.marker and not requirement.marker.evaluate({"extra": asked_as})):
            continue
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            missing.add(name)
            continue
        found[name] = installed.version
        for extra in ("", *requirement.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                waiting += [(Requirement(text), extra) for text in installed.requires or ()]
    return found, missing


if __name__ == "__main__":
    sys.exit(main())
