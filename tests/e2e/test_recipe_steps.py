"""The Python steps of the image recipes, run in a clean virtual environment on this machine's CPU.

NVIDIA's base image cannot be had here: what it brings is taken from the environment of this test. Everything else is
what the recipe itself installs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.helpers.commands import ROOT

RECIPE = ROOT / "environments" / "recipe_latest.def"
LOCK_INSIDE = "/opt/llava_mcore/image.lock.txt"
BASE = (
    *("torch", "torchgen", "torchvision", "torchvision.libs", "functorch", "numpy", "numpy.libs", "triton", "nvidia"),
    *("setuptools", "_distutils_hack"),
)
"""Folders of what environments/image_lock.py leaves to the base."""


PIP_INSTALL = "python3 -m pip install --no-cache-dir "


def steps(venv: Path) -> str:
    """Return the commands of %post, with this checkout's lock file; uv installs, if there is one: pip takes minutes."""
    text = RECIPE.read_text(encoding="utf-8")
    assert f"environments/image.lock.txt {LOCK_INSIDE}" in text
    post = text.split("%post\n")[1].split("\n%")[0]
    assert LOCK_INSIDE in post
    assert PIP_INSTALL in post
    if shutil.which("uv"):
        post = post.replace(PIP_INSTALL, f"uv pip install --quiet --python {venv / 'bin' / 'python3'} ")
    return post.replace(LOCK_INSIDE, str(ROOT / "environments" / "image.lock.txt"))


def stand_in_for_the_base(venv: Path) -> None:
    """Make a virtual environment that holds what the base image holds, as links to what runs this test."""
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    target = venv / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    source = Path(sysconfig.get_paths()["purelib"])
    wanted = [path for path in source.iterdir() if path.name in BASE]
    wanted += [path for name in BASE for path in source.glob(f"{name}-*.dist-info")]
    for path in wanted:
        (target / path.name).symlink_to(path)


@pytest.mark.long
def test_the_recipe_installs_what_training_needs(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    stand_in_for_the_base(venv)
    before = subprocess.run([venv / "bin/python", "-m", "pip", "freeze"], capture_output=True, text=True, check=True)
    assert "transformers" not in before.stdout and "torch==" in before.stdout
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environ |= {"PATH": f"{venv / 'bin'}{os.pathsep}{environ['PATH']}"}
    subprocess.run(["bash", "-euo", "pipefail", "-c", steps(venv)], env=environ, check=True, cwd=tmp_path)
    train = "python3 -m benchmarks.async_save --shape tiny --gpus 2 --steps 4 --warm-up 1 --samples 24"
    sizes = "--seq-length 1024 --global-batch-size 2"
    done = subprocess.run(
        ["bash", "-c", f"python3 -m pip check; python3 -m llava_mcore --help && {train} {sizes} --dir {tmp_path}"],
        env=environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "step beside a save" in done.stdout
    shutil.rmtree(venv)
