"""Our kernels on the CPU; tests/gpu/test_kernels.py compiles them."""

from __future__ import annotations

import os
import subprocess
import sys


def test_interpreted_kernels_compute_what_torch_does() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.interpreted_kernels"]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("6 shapes agree\n")
