"""The tested versions of packages, and a line at the start of a run with other versions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

TESTED = {
    "torch": ("2.11.0", "2.15.0"),
    "torchvision": ("0.26.0", "0.29.2"),
    "transformers": ("5.17.0", "5.23.0"),
    "megatron-core": ("0.19.2", "0.19.2"),
    "megatron-energon": ("7.4.1", "7.4.1"),
    "transformer-engine": ("2.20", "2.20"),
}
"""Package -> the lowest and the highest tested version: from cpu.lock.txt and newest.lock.txt, and of the extra `gpu`.
Releases that differ only in their third number count as one."""


def untested_versions(installed: Mapping[str, str]) -> list[str]:
    """Return installed versions outside the tested ranges, such as "torch 2.16.0 (tested: 2.11.0 to 2.15.0)"."""
    untested = []
    for name, (low, high) in TESTED.items():
        if name in installed and not _release(low) <= _release(installed[name]) < _next_minor(high):
            ends = low if low == high else f"{low} to {high}"
            untested.append(f"{name} {installed[name]} (tested: {ends})")
    return untested


def _release(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version; NVIDIA's images have versions such as 2.12.0a0+1a2b3c."""
    match = re.match(r"[0-9]+(\.[0-9]+)*", text)
    return tuple(int(x) for x in match[0].split(".")) if match else ()


def _next_minor(text: str) -> tuple[int, int]:
    major, minor = _release(text)[:2]
    return major, minor + 1


def installed_versions() -> dict[str, str]:
    """Return the installed versions of the packages in TESTED without importing them."""
    installed = {}
    for name in TESTED:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def untested_line() -> str | None:
    """Return one line with the packages in untested versions; None if there are none."""
    untested = untested_versions(installed_versions())
    return f"versions that have not been tested: {', '.join(untested)}; see docs/install.md" if untested else None
