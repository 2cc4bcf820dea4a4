"""What a benchmark starts ends with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.helpers.commands import ROOT

BENCHMARK = """
import subprocess, sys
from benchmarks.runs import ending_with_us
run = subprocess.Popen(ending_with_us([sys.executable, "-c", "import time; time.sleep(60)"]))
print(run.pid, flush=True)
run.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_ends_with_its_benchmark(number: signal.Signals) -> None:
    """Left alone it would share the GPUs with the next one."""
    with subprocess.Popen([sys.executable, "-c", BENCHMARK], stdout=subprocess.PIPE, text=True, cwd=ROOT) as benchmark:
        assert benchmark.stdout is not None
        run = psutil.Process(int(benchmark.stdout.readline()))
        while run.name() and "sleep" not in " ".join(run.cmdline()):
            time.sleep(0.02)
        benchmark.send_signal(number)
        assert benchmark.wait() == -number
    _, alive = psutil.wait_procs([run], timeout=20)
    assert not alive
