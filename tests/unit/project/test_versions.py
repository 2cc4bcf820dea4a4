"""The ranges in pyproject.toml, the two locks and what is said about other versions agree."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from llava_mcore.cli import inspect_folder
from llava_mcore.compat.tested import TESTED, installed_versions, untested_versions

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def lock(name: str) -> dict[str, str]:
    lines = (ROOT / "environments" / f"{name}.lock.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


LOCKS = {name: lock(name) for name in ("cpu", "newest")}
RUNTIME = [Requirement(text) for text in PROJECT["dependencies"]]
EXTRAS = {extra: [Requirement(text) for text in texts] for extra, texts in PROJECT["optional-dependencies"].items()}


@pytest.mark.parametrize("requirement", RUNTIME, ids=str)
def test_a_range_begins_at_the_lock_and_holds_the_newest_that_was_tested(requirement: Requirement) -> None:
    name = canonicalize_name(requirement.name)
    low, high = (LOCKS[end][name] for end in ("cpu", "newest"))
    assert requirement.specifier.contains(low) and requirement.specifier.contains(high)
    begin = next(Version(x.version) for x in requirement.specifier if x.operator == ">=").release
    assert Version(low).release[: len(begin)] == begin, f"{requirement} allows less than {low}, the lowest tested"


@pytest.mark.parametrize("name", [name for name in TESTED if name != "transformer-engine"])
def test_the_tested_versions_are_those_of_the_locks_and_the_cap_is_the_next(name: str) -> None:
    low, high = TESTED[name]
    assert (low, high) == (LOCKS["cpu"][name], LOCKS["newest"][name])
    specifier = next(x.specifier for x in RUNTIME if x.name == name)
    major, minor = Version(high).release[:2]
    assert specifier.contains(f"{major}.{minor}.99") and not specifier.contains(f"{major}.{minor + 1}")
    assert all(x.specifier == specifier for extra in EXTRAS.values() for x in extra if x.name == name)


def test_the_docs_have_the_same_table() -> None:
    rows = [line.split("|")[1:-1] for line in (ROOT / "docs" / "install.md").read_text().splitlines() if "`>=" in line]
    found = {
        name.strip(): (low.strip(), high.strip(), SpecifierSet(rest.strip(" `"))) for name, low, high, rest in rows
    }
    assert found.keys() == TESTED.keys() - {"transformer-engine"} | {"huggingface-hub"}
    for name, row in found.items():
        specifier = next(x.specifier for x in RUNTIME if x.name == name)
        assert row == (LOCKS["cpu"][name], LOCKS["newest"][name], specifier)


def test_transformer_engine_is_the_gpu_extra_s() -> None:
    (requirement,) = EXTRAS["gpu"]
    low, high = TESTED["transformer-engine"]
    assert low == high and requirement.name == "transformer-engine"
    assert requirement.specifier.contains(f"{low}.1") and not requirement.specifier.contains("2.19.9")


def test_the_gpu_environment_is_the_lowest_tested_one_with_transformer_engine() -> None:
    """`make venv-gpu` installs with both locks as constraints, so none of them may have a package of the other."""
    gpu = lock("gpu")
    assert not gpu.keys() & LOCKS["cpu"].keys()
    (requirement,) = EXTRAS["gpu"]
    engines = {name: version for name, version in gpu.items() if name.startswith("transformer-engine")}
    major = Version(LOCKS["cpu"]["cuda-toolkit"]).major
    assert engines.keys() == {"transformer-engine", "transformer-engine-torch", f"transformer-engine-cu{major}"}
    (tested,) = set(engines.values())
    assert requirement.specifier.contains(tested)
    install = (ROOT / "docs" / "install.md").read_text()
    assert f"| transformer-engine | {tested} | {tested} |" in install
    assert f"the lowest versions and Transformer Engine {tested} only" in install


def test_this_environment_is_one_of_the_locks() -> None:
    """Whatever the tests ran with is what the locks say they ran with."""
    installed = {name: text for name, text in installed_versions().items() if name != "transformer-engine"}
    assert installed in [{name: x[name] for name in installed} for x in LOCKS.values()]


def test_what_is_outside_of_the_tested_versions_is_named() -> None:
    assert untested_versions({"torch": "2.11.0", "transformers": "5.23.0", "megatron-energon": "7.4.9"}) == []
    assert untested_versions({"torch": "2.12.0a0+1a2b3c.nv26.3", "transformer-engine": "2.20.3"}) == []
    assert untested_versions({"torch": "2.16.0", "transformers": "5.16.2", "megatron-core": "0.20.0rc1"}) == [
        "torch 2.16.0 (tested: 2.11.0 to 2.15.0)",
        "transformers 5.16.2 (tested: 5.17.0 to 5.23.0)",
        "megatron-core 0.20.0rc1 (tested: 0.19.2)",
    ]


def test_a_command_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tmp_path)]
    inspect_folder.main(arguments)
    before = capsys.readouterr().err
    known = importlib.metadata.version
    monkeypatch.setattr("llava_mcore.compat.tested.version", lambda x: "3.0.1" if x == "torch" else known(x))
    inspect_folder.main(arguments)
    line = "warning: versions that have not been tested: torch 3.0.1 (tested: 2.11.0 to 2.15.0); see docs/install.md\n"
    assert capsys.readouterr().err == line + before


@pytest.mark.parametrize("rank", [0, 1])
def test_a_training_process_says_so_on_the_first_rank(rank: int, tmp_path: Path) -> None:
    """Said before anything heavy is imported, so a run that cannot start says it too."""
    package = tmp_path / "torch-9.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.0\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "llava_mcore.launch.worker", "--config", str(tmp_path / "absent.yaml")],
        env=os.environ | {"PYTHONPATH": path, "RANK": str(rank)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    said = "versions that have not been tested: torch 9.0 (tested: 2.11.0 to 2.15.0); see docs/install.md\n"
    assert done.stdout == (said if rank == 0 else "")
