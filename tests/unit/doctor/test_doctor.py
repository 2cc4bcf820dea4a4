"""`doctor`: packages that are missing, broken or too old, machines without GPUs, and the self-test by its command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from llava_mcore.cli import doctor
from llava_mcore.doctor import examination, machine, packages, self_test
from llava_mcore.doctor.imports import Imported, import_all
from llava_mcore.doctor.machine import NvidiaDriver, environment_rows, gpu_rows, limit_rows, tool_rows
from llava_mcore.doctor.packages import PURPOSES, extra_rows, required_rows
from llava_mcore.doctor.requirements import ProjectRequirements
from llava_mcore.doctor.rows import DoctorRow, problems_of, table
from llava_mcore.doctor.self_test import Comparison, SelfTest, rows_of

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GPU = {"name": "NVIDIA H100 80GB HBM3", "memory": 80 << 30, "capability": "9.0"}
TORCH: dict[str, Any] = {"cuda": "13.0", "nccl": "2.28.9", "cudnn": "9.19.0", "gpus": [], "warning": ""}
STEP = Comparison("fp32, torch's layers", 6.0, 6.0, 1e-5, "w", 1e-6, 1e-3, True)


def project(*runtime: str, **extras: list[str]) -> ProjectRequirements:
    parsed = {name: [Requirement(text) for text in texts] for name, texts in extras.items()}
    return ProjectRequirements([Requirement(text) for text in runtime], parsed, in_checkout=True)


def by_name(rows: list[DoctorRow]) -> dict[str, DoctorRow]:
    return {row.name: row for row in rows}


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The versions of packages that the test says are installed, and of no other."""
    installed: dict[str, str] = {}
    monkeypatch.setattr(packages, "installed_version", installed.get)
    monkeypatch.setattr(packages, "_missing", lambda x: [] if x.name in installed else [x.name])
    return installed


def test_what_is_expected_is_what_pyproject_says() -> None:
    requirements = ProjectRequirements.read()
    assert [str(x) for x in requirements.runtime] == [str(Requirement(x)) for x in PROJECT["dependencies"]]
    assert requirements.in_checkout
    assert PURPOSES.keys() == PROJECT["optional-dependencies"].keys() - {"dev"}


def test_an_installed_package_has_the_same_from_its_metadata(tmp_path: Path) -> None:
    requirements = ProjectRequirements.read(tmp_path)
    assert not requirements.in_checkout
    assert {x.name for x in requirements.runtime} == {Requirement(x).name for x in PROJECT["dependencies"]}
    (engine,) = requirements.of_extra("gpu")
    assert (engine.name, str(engine.specifier)) == ("transformer-engine", "==2.20.*")
    assert requirements.install_extra("gpu") == 'pip install "llava-mcore[gpu]"'


def test_packages_that_are_missing_old_or_broken(versions: dict[str, str]) -> None:
    versions |= {"torch": "2.12.0a0+1a2b3c.nv26.3", "transformers": "5.16.2", "Pillow": "13.0.0", "odd": "unknown"}
    wanted = project("torch>=2.11,<2.16", "transformers>=5.17,<5.24", "Pillow>=13.0", "rich>=15", "odd>=1")
    rows = by_name(required_rows(wanted, {"PIL.Image": "OSError: libjpeg.so: no such file"}))
    assert (rows["torch"].status, rows["torch"].expected) == ("ok", ">=2.11,<2.16"), "an image's own build"
    assert problems_of(rows.values()) == [
        'transformers: 5.16.2 is not >=5.17,<5.24: pip install "transformers>=5.17,<5.24"',
        'Pillow: cannot be imported (OSError: libjpeg.so: no such file): pip install --force-reinstall "Pillow>=13.0"',
        'rich: is not installed: pip install "rich>=15"',
        'odd: unknown is not >=1: pip install "odd>=1"',
    ]


def test_extras_say_what_they_are_for_and_how_to_install_them(versions: dict[str, str]) -> None:
    versions |= {"av": "19.0", "soxr": "0.9"}
    wanted = project(video=["av>=19"], audio=["soxr>=1"], speech=["llava-mcore[audio]", "jiwer>=4"])
    rows = by_name(extra_rows(wanted, {}, on_gpus=False))
    assert (rows["video"].status, rows["video"].value) == ("ok", "av 19.0")
    assert rows["audio"].status == "note" and "soxr is not >=1" in rows["audio"].message
    assert rows["speech"].status == "absent"
    assert rows["speech"].message.endswith('missing: jiwer: pip install -e ".[speech]"')
    assert problems_of(rows.values()) == [], "they are optional"


def test_transformer_engine_is_for_gpus(versions: dict[str, str]) -> None:
    wanted, error = project(gpu=["transformer-engine==2.20.*"]), {"transformer_engine.pytorch": "OSError: libcudnn"}

    def row(errors: dict[str, str], on_gpus: bool = True) -> DoctorRow:
        (only,) = extra_rows(wanted, errors, on_gpus=on_gpus)
        return only

    assert row({}, on_gpus=False).status == "absent"
    assert row({}).status == "note" and "make venv-gpu" in row({}).message
    versions["transformer-engine"] = "2.20.2"
    assert row({}).status == "ok"
    assert row(error).status == "problem" and "libcudnn" in row(error).message
    versions["transformer-engine"] = "2.13.0"
    assert row({}).status == "note"


def test_a_module_that_ends_its_process_is_named_and_the_others_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raises.py").write_text("raise OSError('libcudart.so.13: no such file')")
    (tmp_path / "crashes.py").write_text("import os; os.abort()")
    (tmp_path / "hangs.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    imported = import_all(["raises", "json", "crashes", "csv"])
    assert imported == Imported(
        {"raises": "OSError: libcudart.so.13: no such file", "crashes": "the process was ended by SIGABRT"}
    )
    assert import_all(["hangs"], seconds=2).errors == {"hangs": "it has not ended after 2 seconds"}


def test_gpus_and_libraries() -> None:
    """Each GPU has a row; one without FP8 says so and is no problem."""
    old = GPU | {"name": "NVIDIA A100", "capability": "8.0"}
    rows = by_name(gpu_rows(TORCH | {"gpus": [GPU, old]}, NvidiaDriver("580.159.04")))
    assert rows["driver"].value == "580.159.04" and rows["NCCL"].value == "2.28.9"
    assert rows["GPU 0"].value == "NVIDIA H100 80GB HBM3, 80 GiB, compute capability 9.0"
    assert "no --fp8" in rows["GPU 1"].message and rows["GPU 0"].message == ""
    assert problems_of(rows.values()) == []


@pytest.mark.parametrize(
    ("torch", "driver", "visible", "status", "text"),
    [
        ({}, None, None, "absent", "on the CPU"),
        ({}, "580.1", "", "note", "hidden by CUDA_VISIBLE_DEVICES="),
        ({"cuda": None}, "580.1", None, "problem", "built for CPUs"),
        (
            {"warning": "The NVIDIA driver is too old"},
            "535.1",
            None,
            "problem",
            "driver 535.1: The NVIDIA driver is too",
        ),
    ],
)
def test_why_torch_sees_no_gpu(
    torch: dict[str, Any],
    driver: str | None,
    visible: str | None,
    status: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    row = by_name(gpu_rows(TORCH | torch, NvidiaDriver(driver, ["NVIDIA H100"])))["GPU"]
    assert row.status == status and text in row.message


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("580.159.04, NVIDIA H200\n580.159.04, NVIDIA H200\n", NvidiaDriver("580.159.04", ["NVIDIA H200"] * 2)),
        (
            "NVIDIA-SMI has failed, as usual.\n",
            NvidiaDriver(None, failure="nvidia-smi lists no GPU: NVIDIA-SMI has failed, as usual."),
        ),
    ],
)
def test_what_nvidia_smi_says(
    output: str, expected: NvidiaDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncat {tmp_path}/output\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "output").write_text(output)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(machine, "_DRIVER_FILE", tmp_path / "absent")
    assert NvidiaDriver.detect() == expected


def test_a_torch_that_cannot_be_imported_leaves_what_the_driver_knows() -> None:
    rows = by_name(gpu_rows(None, NvidiaDriver("580.1", ["NVIDIA H100"])))
    assert rows["GPU 0"].value == "NVIDIA H100" and problems_of(rows.values()) == []


def test_variables_that_matter_and_those_that_train_sets() -> None:
    environ = {"CUDA_LAUNCH_BLOCKING": "1", "NCCL_DEBUG": "INFO", "HOME": "/root", "CUDA_SCALE_LAUNCH_QUEUES": "2x"}
    rows = by_name(environment_rows(environ, on_gpus=True))
    assert rows.keys() == environ.keys() - {"HOME"} | {"NCCL_GRAPH_REGISTER", "PYTORCH_ALLOC_CONF"}
    assert rows["CUDA_LAUNCH_BLOCKING"].status == "note" and rows["NCCL_DEBUG"].status == "ok"
    assert rows["CUDA_SCALE_LAUNCH_QUEUES"].value == "2x"
    assert len(environment_rows(environ, on_gpus=False)) == 3


def test_limits_and_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler is a problem only where kernels are built."""
    rows = by_name([*limit_rows(8), *tool_rows(builds_kernels=True)])
    assert rows.keys() >= {"temporary folder", "/dev/shm", "open files", "C compiler and Python.h", "sbatch"}
    assert "GiB free" in rows["temporary folder"].value
    monkeypatch.setattr(machine, "can_build_kernels", lambda: False)
    assert (
        tool_rows(builds_kernels=True)[0].status == "problem" and tool_rows(builds_kernels=False)[0].status == "absent"
    )


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (replace(STEP, loss=6.001), "loss 6.001000 instead of 6.000000"),
        (replace(STEP, gradient_difference=0.5), "gradient of w off by 5.0e-01"),
        (replace(STEP, loss=float("nan")), "loss nan instead of 6.000000"),
        (replace(STEP, updated=False), "has not updated"),
    ],
)
def test_a_wrong_step_is_a_problem(step: Comparison, text: str) -> None:
    (problem,) = problems_of(rows_of(SelfTest("cuda", 2, "tp 2 x dp 1", [], [STEP, step]), 20.0))
    assert text in problem


def test_a_wrong_sum_is_a_problem() -> None:
    (problem,) = problems_of(rows_of(SelfTest("cuda", 2, "tp 2 x dp 1", [1], [STEP]), 20.0))
    assert problem.startswith("all-reduce: a sum over all ranks is wrong on rank 1")


def test_a_self_test_that_ends_early_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "run_limited", lambda *_: ("", "Traceback\nRuntimeError: NCCL error\n", None))
    (problem,) = problems_of(self_test.self_test_rows(4))
    assert problem == "training step: failed: RuntimeError: NCCL error (NCCL_DEBUG=INFO shows what NCCL does)"


def test_one_message_lists_all_problems_and_the_step_is_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        examination, "import_all", lambda *_: Imported({"torch": "ImportError: a", "rich": "OSError: b"})
    )
    assert doctor.main(["--json"]) == 2
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert not report["ok"] and len(report["problems"]) == 2
    assert "error: this machine is not ready (2 problems):\n  - torch: cannot be imported (ImportError: a)" in err
    assert report["rows"][-1]["message"] == "not run: packages come first"
    assert doctor.main(["--no-self-test"]) == 2
    assert "  problem  torch " in capsys.readouterr().out


def test_the_table_is_aligned() -> None:
    rows = [DoctorRow("a", "x", "1", ">=1"), DoctorRow("a", "long name", "22", message="why"), DoctorRow("b", "y", "")]
    assert table(rows) == "a\n  ok  x          1   >=1\n  ok  long name  22       why\n\nb\n  ok  y"


@pytest.mark.long
def test_this_machine_s_step_equals_transformers() -> None:
    """By the command, with two processes over gloo."""
    command = [sys.executable, "-m", "llava_mcore", "doctor", "--json"]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = by_name([DoctorRow(**row) for row in json.loads(done.stdout)["rows"]])
    assert rows["all-reduce"].value == "2 processes on the CPU, tp 2 x dp 1"
    assert rows["fp32, torch's layers"].status == "ok"
