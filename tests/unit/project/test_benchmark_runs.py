"""What a benchmark starts ends with it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.commands import ROOT

BENCHMARK = """
import subprocess
import sys
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
        run, end = psutil.Process(int(benchmark.stdout.readline())), time.monotonic() + 60
        while run.cmdline()[1:2] != ["-c"]:  # until then it prepares to end with its parent
            assert time.monotonic() < end
            time.sleep(0.02)
        benchmark.send_signal(number)
        assert benchmark.wait() == -number
    while is_running(run):
        assert time.monotonic() < end
        time.sleep(0.02)


def is_running(process: psutil.Process) -> bool:
    """Return whether a process has not ended; nobody may have waited for one that has."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_hosts_start_and_step(tmp_path: Path) -> None:
    """Two replicas of two ranks, and what their start costs on paper."""
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.start_at_scale", "--tp", "2", "--json", str(result)]
    subprocess.run([*command, "--processes", "4", "--steps", "2"], check=True, cwd=ROOT, timeout=600)
    [row] = json.loads(result.read_text())["rows"]
    assert (row["processes"], row["files of positions"]) == (4, 2)
    subprocess.run([*command, "--ranks", "64"], check=True, cwd=ROOT, timeout=600)
    rows = {row["per rank"]: (row["plain"], row["now"]) for row in json.loads(result.read_text())["rows"]}
    assert rows["groups on gloo that it is in"] == ("5", "3")
    assert rows["the same, over all ranks"] == ("1,024", "63")
    assert rows["messages one after the other in it"] == ("126", "6")


def test_answers_by_two_processes() -> None:
    """The benchmark of `generate` at tp 2, which checks the tokens itself."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--device", "cpu", "--shape", "tiny", "--num-new", "3", "--rows", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "benchmarks.generate", *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "tp 2" in done.stdout and "| cache, 2 prompts at a time |" in done.stdout
