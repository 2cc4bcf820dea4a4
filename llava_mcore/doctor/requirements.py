"""The packages that pyproject.toml asks for, and how to install one."""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import llava_mcore
from llava_mcore.errors import ConfigError

PROJECT = "llava-mcore"
CHECKOUT = Path(llava_mcore.__file__).parents[1]


@dataclass(frozen=True)
class ProjectRequirements:
    """Packages that the project needs, and those that each extra adds. in_checkout: read from pyproject.toml."""

    runtime: Sequence[Requirement]
    extras: Mapping[str, Sequence[Requirement]]
    in_checkout: bool

    @classmethod
    def read(cls, folder: Path = CHECKOUT) -> ProjectRequirements:
        """Read the checkout's pyproject.toml, or the metadata of the installed package, which are made of it.

        Raises:
            ConfigError: there is neither.
        """
        file = folder / "pyproject.toml"
        if file.is_file():
            project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
            if project.get("name") == PROJECT:
                runtime = [Requirement(text) for text in project["dependencies"]]
                extras = {
                    x: [Requirement(text) for text in texts] for x, texts in project["optional-dependencies"].items()
                }
                return cls(runtime, extras, in_checkout=True)
        try:
            metadata = importlib.metadata.metadata(PROJECT)
        except importlib.metadata.PackageNotFoundError as error:
            raise ConfigError(
                f"{folder} has no pyproject.toml of {PROJECT}, and the package is not installed"
            ) from error
        lines = [Requirement(text) for text in metadata.get_all("Requires-Dist") or ()]
        names = metadata.get_all("Provides-Extra") or ()
        extras = {name: [x for x in lines if is_of_extra(x, name)] for name in names}
        return cls(
            [x for x in lines if x.marker is None or x.marker.evaluate({"extra": ""})], extras, in_checkout=False
        )

    def of_extra(self, extra: str) -> Iterator[Requirement]:
        """Yield what an extra adds, with that of other extras that it names."""
        for requirement in self.extras[extra]:
            if canonicalize_name(requirement.name) == PROJECT:
                for other in sorted(requirement.extras):
                    yield from self.of_extra(other)
            else:
                yield requirement

    def install_extra(self, extra: str) -> str:
        """Return the command that installs an extra."""
        return f'pip install -e ".[{extra}]"' if self.in_checkout else f'pip install "{PROJECT}[{extra}]"'


def is_of_extra(requirement: Requirement, extra: str) -> bool:
    """Return whether a package has this requirement with an extra only."""
    marker = requirement.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def install(requirement: Requirement) -> str:
    """Return the command that installs a package in a version that is allowed."""
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f'pip install "{requirement.name}{extras}{range_of(requirement)}"'


def range_of(requirement: Requirement) -> str:
    """Return the versions that are allowed, the lowest one first."""
    return ",".join(sorted(map(str, requirement.specifier), reverse=True))
