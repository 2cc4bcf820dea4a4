"""`doctor` on every GPU: its command, a sum over all ranks, and a step in fp32 and in bf16 beside transformers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from llava_mcore.doctor.rows import problems_of
from llava_mcore.doctor.self_test import self_test_rows
from tests.helpers.commands import ROOT

pytestmark = pytest.mark.gpu
NUM_GPUS = torch.cuda.device_count()


def test_the_command_names_every_gpu() -> None:
    """Other packages than those of the tests may be missing here, which is exit code 2."""
    command = [sys.executable, "-m", "llava_mcore", "doctor", "--json", "--no-self-test"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["ok"] else 2)
    names = [row["name"] for row in report["rows"] if row["name"].startswith("GPU ")]
    assert names == [f"GPU {i}" for i in range(NUM_GPUS)]
    assert all(row["value"] != "-" for row in report["rows"] if row["name"] in ("driver", "CUDA", "NCCL", "cuDNN"))


def test_a_step_equals_transformers() -> None:
    rows = self_test_rows(NUM_GPUS)
    print(*rows, sep="\n")
    assert problems_of(rows) == []
    sums, fp32, bf16, _ = rows
    assert sums.value.startswith(f"{NUM_GPUS} GPUs, ")
    assert fp32.name == "fp32, torch's layers" and bf16.name.startswith("bf16, ")
