"""The versions that the tests ran with, and one line at a start with others."""

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
"""Package -> the lowest and the highest version that was tested: those of cpu.lock.txt and newest.lock.txt, and of the
extra `gpu`. Releases that differ in their third number only count as one."""


def untested_versions(installed: Mapping[str, str]) -> list[str]:
    """Return what is installed outside the tested ranges, such as "torch 2.16.0 (tested: 2.11.0 to 2.15.0)"."""
    found = []
    for name, (low, high) in TESTED.items():
        if name in installed and not _release(low) <= _release(installed[name]) < _next_minor(high):
            ends = low if low == high else f"{low} to {high}"
            found.append(f"{name} {installed[name]} (tested: {ends})")
    return found


def _release(text: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: NVIDIA's images have such as 2.12.0a0+1a2b3c."""
    numbers = re.match(r"[0-9]+(\.[0-9]+)*", text)
    return tuple(int(x) for x in numbers[0].split(".")) if numbers else ()


def _next_minor(text: str) -> tuple[int, int]:
    major, minor = _release(text)[:2]
    return major, minor + 1


def installed_versions() -> dict[str, str]:
    """Return the versions of those of TESTED that are installed as packages; imports none of them."""
    found = {}
    for name in TESTED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def untested_line() -> str | None:
    """Return one line that names what is installed in an untested version; None: nothing is."""
    found = untested_versions(installed_versions())
    return f"versions that have not been tested: {', '.join(found)}; see docs/versions.md" if found else None
