"""The wheel and the source distribution: complete, and usable from any folder without the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.helpers.commands import ROOT, read_metrics
from tests.helpers.shards import make_dataset
from tests.helpers.tiny_hf import make_hf_llava

BUILD = "from setuptools import build_meta as b; print(b.build_sdist('out')); print(b.build_wheel('out'))"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution and the wheel, built from a copy of what is packaged."""
    folder = tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT / "llava_mcore", folder / "llava_mcore", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    sdist, wheel = (folder / "out" / next((folder / "out").glob(x)) for x in ("*.tar.gz", "*.whl"))
    return sdist, wheel


def test_both_have_every_file_of_the_package(built: tuple[Path, Path]) -> None:
    files = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "llava_mcore").rglob("*")
        if path.is_file() and path.suffix in (".py", ".jinja")
    }
    with tarfile.open(built[0]) as sdist, zipfile.ZipFile(built[1]) as wheel:
        assert files <= {name.partition("/")[2] for name in sdist.getnames()}
        assert files <= set(wheel.namelist())


def test_the_installed_package_imports_trains_and_exports(built: tuple[Path, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        wheel.extractall(tmp_path / "site")
    make_hf_llava(tmp_path / "hf")
    make_dataset(tmp_path / "data")
    sizes = ["--train-iters", "2", "--micro-batch-size", "2", "--global-batch-size", "4", "--seq-length", "64"]
    places = ["--megatron-load-dir", "megatron", "--tokenizer-load-dir", "hf", "--data-path", "data"]
    commands = [
        ["import-hf", "--hf-dir", "hf", "--megatron-dir", "megatron"],
        ["train", "-g", "2", "--name", "run", "--save-dir", "save", "--save", *places, *sizes],
        ["export-hf", "--megatron-dir", "save/run", "--hf-dir", "exported"],
    ]
    env = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "CUDA_VISIBLE_DEVICES": ""}
    for command in commands:
        line = [sys.executable, "-m", "llava_mcore", *command]
        done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        assert str(ROOT) not in done.stdout + done.stderr
    assert len(read_metrics(tmp_path / "save" / "run")) == 2
    assert (tmp_path / "exported" / "model.safetensors").is_file()
