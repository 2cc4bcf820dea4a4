"""Rows of packages: those that every run needs, and those of optional extras."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from llava_mcore.doctor.requirements import ProjectRequirements, install, is_of_extra, range_of
from llava_mcore.doctor.rows import DoctorRow

REQUIRED, OPTIONAL = "packages", "extras"
ENGINE = "transformer-engine"
MODULES = {
    "megatron-core": "megatron.core",
    "megatron-energon": "megatron.energon",
    "protobuf": "google.protobuf",
    "Pillow": "PIL.Image",
    "PyYAML": "yaml",
    ENGINE: "transformer_engine.pytorch",
    "fla-core": "fla.ops",
    "flash-attn-4": "flash_attn.cute",
}
"""Package -> the module that is imported, if it has another name."""
PURPOSES = {
    "gpu": "Transformer Engine: training on GPUs, FP8",
    "delta": "flash-linear-attention: Qwen3.5 on GPUs",
    "flash": "FlashAttention 4: faster attention on Hopper",
    "muon": "optimizer.name muon",
    "video": "video files in prepare, generate and chat",
    "audio": "audio clips in prepare, generate, chat and training",
    "qlora": "--lora-quantize nf4, --load-in-4bit",
    "remote": "data in object stores",
    "dedup": "dedup",
    "eval": "evaluate",
    "serve": "serve",
    "smolvlm": "SmolVLM's processor in transformers",
    "mlflow": "--mlflow",
    "quickstart": "make quickstart",
    "small-vlm": "make demo",
    "speech": "examples/speech",
}
"""Extra -> what it is for; without that of tests."""
_LISTED = 3  # packages of an extra


def module_of(requirement: Requirement) -> str:
    """Return the module of a package that is imported to see whether it works."""
    return MODULES.get(requirement.name, requirement.name.replace("-", "_"))


def installed_version(name: str) -> str | None:
    """Return the version of a package, "unknown" if its metadata are damaged; None if it is not installed."""
    try:
        metadata = importlib.metadata.distribution(name).metadata
    except importlib.metadata.PackageNotFoundError:
        return None
    return metadata.get("Version") or "unknown"


def allows(requirement: Requirement, version: str) -> bool:
    """Return whether a version is allowed; an image's own build, such as 2.12.0a0+1a2b3c, counts as its release."""
    try:
        release = Version(version).base_version
    except InvalidVersion:
        return False
    return requirement.specifier.contains(release)


def required_rows(project: ProjectRequirements, errors: Mapping[str, str]) -> list[DoctorRow]:
    """Return a row of every package that the project needs. errors: modules that cannot be imported, with reasons."""
    rows = []
    for requirement in project.runtime:
        version, error = installed_version(requirement.name), errors.get(module_of(requirement))
        message = ""
        if version is None:
            message = f"is not installed: {install(requirement)}"
        elif not allows(requirement, version):
            message = f"{version} is not {range_of(requirement)}: {install(requirement)}"
        elif error is not None:
            again = install(requirement).replace("install", "install --force-reinstall", 1)
            message = f"cannot be imported ({error}): {again}"
        rows.append(
            DoctorRow(
                REQUIRED,
                requirement.name,
                version or "-",
                range_of(requirement),
                "problem" if message else "ok",
                message,
            )
        )
    return rows


def extra_rows(project: ProjectRequirements, errors: Mapping[str, str], *, on_gpus: bool) -> list[DoctorRow]:
    """Return a row of every extra: its packages, and what it is for."""
    return [_extra_row(project, extra, errors, on_gpus=on_gpus) for extra in project.extras if extra in PURPOSES]


def _extra_row(project: ProjectRequirements, extra: str, errors: Mapping[str, str], *, on_gpus: bool) -> DoctorRow:
    requirements = list(project.of_extra(extra))
    purpose = PURPOSES[extra]
    values = [f"{x.name} {installed_version(x.name) or '-'}" for x in requirements]
    expected = ", ".join(range_of(x) for x in requirements)
    if len(requirements) > _LISTED:
        values, expected = [f"{len(requirements)} packages"], ""
    row = DoctorRow(OPTIONAL, extra, ", ".join(values), expected, message=purpose)
    missing = [name for x in requirements for name in _missing(x)]
    broken = [f"{x.name} cannot be imported ({errors[module_of(x)]})" for x in requirements if module_of(x) in errors]
    other = [x for x in requirements if not _missing(x) and not allows(x, installed_version(x.name) or "")]
    if extra == "gpu":
        return _engine_row(row, missing, broken, other, on_gpus=on_gpus)
    if missing:
        return replace(
            row, status="absent", message=f"{purpose}; missing: {', '.join(missing)}: {project.install_extra(extra)}"
        )
    if broken or other:
        reasons = [*broken, *(f"{x.name} is not {range_of(x)}" for x in other)]
        return replace(row, status="note", message=f"{purpose}; {', '.join(reasons)}: {project.install_extra(extra)}")
    return row


def _engine_row(
    row: DoctorRow, missing: Sequence[str], broken: Sequence[str], other: Sequence[Requirement], *, on_gpus: bool
) -> DoctorRow:
    """Return the row of Transformer Engine, which a machine with GPUs should have; a broken one is a problem there."""
    remedy = "make venv-gpu (docs/install.md)"
    if not on_gpus:
        return replace(row, status="absent", message=f"{row.message}; this machine has no GPU") if missing else row
    if missing:
        return replace(
            row, status="note", message=f"without it GPUs use torch's layers, without --fp8 and CUDA graphs: {remedy}"
        )
    if broken:
        return replace(row, status="problem", message=f"{broken[0]}: {remedy}, or pip uninstall {ENGINE}")
    if other:
        return replace(row, status="note", message=f"this version has not been tested: {remedy}")
    return row


def _missing(requirement: Requirement) -> Iterator[str]:
    """Yield the package if it is not installed, else what its extras need and is not."""
    try:
        installed = importlib.metadata.distribution(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        yield requirement.name
        return
    lines = [Requirement(text) for text in installed.requires or ()]
    for extra in requirement.extras:
        for line in lines:
            if is_of_extra(line, extra) and installed_version(line.name) is None:
                yield line.name
