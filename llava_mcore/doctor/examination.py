"""All that the doctor looks at, in the order of its table."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import llava_mcore
from llava_mcore.doctor.imports import import_all
from llava_mcore.doctor.machine import NvidiaDriver, environment_rows, gpu_rows, limit_rows, tool_rows
from llava_mcore.doctor.packages import ENGINE, extra_rows, installed_version, module_of, required_rows
from llava_mcore.doctor.requirements import ProjectRequirements
from llava_mcore.doctor.rows import DoctorRow
from llava_mcore.doctor.self_test import SECTION, self_test_rows

_ALSO_IMPORTED = (ENGINE, "bitsandbytes")
"""Optional packages with kernels for GPUs, which may be installed and yet not work there."""


@dataclass(frozen=True)
class Examination:
    """num_gpus: those that torch sees. can_train: all packages that every run needs can be imported."""

    rows: Sequence[DoctorRow]
    num_gpus: int
    can_train: bool


def examine(environ: Mapping[str, str]) -> Examination:
    """Look at the machine and its packages.

    Raises:
        ConfigError: pyproject.toml cannot be read.
    """
    project = ProjectRequirements.read()
    driver = NvidiaDriver.detect()
    imported = import_all(_modules(project, has_driver=driver.version is not None))
    num_gpus = len(imported.torch["gpus"]) if imported.torch is not None else 0
    extras = extra_rows(project, imported.errors, on_gpus=num_gpus > 0)
    builds_kernels = num_gpus > 0 and installed_version(ENGINE) is not None
    version = ".".join(map(str, sys.version_info[:3]))
    rows = [
        DoctorRow("llava_mcore", "version", llava_mcore.__version__),
        DoctorRow("llava_mcore", "Python", f"{version}, {sys.executable}", ">=3.12"),
        *gpu_rows(imported.torch, driver),
        *required_rows(project, imported.errors),
        *extras,
        *limit_rows(num_gpus),
        *tool_rows(builds_kernels=builds_kernels),
        *environment_rows(environ, on_gpus=num_gpus > 0),
    ]
    can_train = all(installed_version(x.name) and module_of(x) not in imported.errors for x in project.runtime)
    return Examination(rows, num_gpus, can_train)


def self_test(examination: Examination) -> list[DoctorRow]:
    """Run the self-test, unless it cannot run without packages that are missing or broken."""
    if not examination.can_train:
        return [DoctorRow(SECTION, "training step", "-", status="absent", message="not run: packages come first")]
    return self_test_rows(examination.num_gpus)


def _modules(project: ProjectRequirements, *, has_driver: bool) -> list[str]:
    """Return the modules of installed packages to import, torch first. Those for GPUs fail without a driver."""
    requirements = [*project.runtime]
    if has_driver:
        optional = [x for extra in project.extras for x in project.of_extra(extra) if x.name in _ALSO_IMPORTED]
        requirements += {x.name: x for x in optional}.values()
    installed = [x for x in requirements if installed_version(x.name) is not None]
    return [module_of(x) for x in sorted(installed, key=lambda x: x.name != "torch")]
