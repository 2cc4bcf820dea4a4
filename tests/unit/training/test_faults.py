"""Spikes, skipped ranges, signals, hangs and out-of-memory errors, without a model."""

from __future__ import annotations

import math
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llava_mcore.config.load import load_run_config
from llava_mcore.config.rules.all_rules import check_values
from llava_mcore.config.sections.faults import parse_ranges
from llava_mcore.errors import ConfigError, TrainingError
from llava_mcore.training.bad_steps import (
    MAX_IN_A_ROW,
    MIN_LOSSES,
    WINDOW,
    NotFinite,
    SpikeAlert,
    explain_out_of_memory,
)
from llava_mcore.training.logs.run_record import git_revision, versions
from llava_mcore.training.step import StepResult


def test_skipped_ranges() -> None:
    """Ranges are separated by commas or spaces; anything else is refused."""
    assert parse_ranges(None) == ()
    assert parse_ranges("3-5,9-9") == parse_ranges("3-5 9-9") == (range(3, 6), range(9, 10))
    for wrong in ("5", "5-3", "0-2", "a-b", "1-2;3-4"):
        with pytest.raises(ConfigError, match="expected ranges of iterations such as"):
            load_run_config(None, [f"faults.skip_train_iteration_range={wrong}"])


def test_flags_that_would_do_nothing_are_refused() -> None:
    found = [
        *check_values(load_run_config(None, ["faults.exit_duration_in_mins=5"])),
        *check_values(load_run_config(None, ["checkpoint.keep_every=5", "checkpoint.async_save=true"])),
    ]
    for text in ("--exit-duration-in-mins would lose", "--keep-every has no effect", "--async-save has no effect"):
        assert sum(text in line for line in found) == 1


def test_a_spike_and_the_range_it_suggests() -> None:
    """A loss far above the last ones is told, with the range of iterations to skip."""
    alert = SpikeAlert(2.0, before=[None, *([1.0] * (MIN_LOSSES - 1))])
    assert alert.check(10, 50.0) is None, "too few losses are known"
    before = [math.inf, *([1.0] * (MIN_LOSSES - 1))]
    assert SpikeAlert(2.0, before).check(10, 50.0) is None, "an infinite loss is none of them"
    assert SpikeAlert(2.0, [*before, 1.0]).check(10, 50.0) is not None
    alert = SpikeAlert(2.0, before=[1.0] * MIN_LOSSES)
    assert alert.check(10, 1.9) is None
    first = alert.check(11, 3.0)
    assert first is not None and "at iteration 11: 3.0000 is 3.0 times" in first
    assert "resume from a checkpoint before iteration 10 with --skip-train-iteration-range 10-11" in first
    assert str(alert.check(12, 4.0)).endswith("10-12"), "the range grows with the spike"
    assert alert.check(13, 1.0) is None and alert.check(14, float("nan")) is None
    assert str(alert.check(15, 9.0)).endswith("14-15")


def test_a_new_level_stops_being_a_spike() -> None:
    alert = SpikeAlert(2.0, before=[1.0] * WINDOW)
    warned = [alert.check(i, 5.0) is not None for i in range(1, 3 * WINDOW)]
    assert warned[0] and not warned[-1]


def test_skipped_updates_in_a_row_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is made between them begins the count again."""
    monkeypatch.setattr(NotFinite, "_describe", lambda *_: "not finite")
    groups: Any = None
    steps = NotFinite(load_run_config(None, ["faults.on_nan=skip"]), groups)
    bad, good = (StepResult(0.0, 0.0, 0.0, 1, updated=x, finite=x) for x in (False, True))
    for iteration in range(1, MAX_IN_A_ROW):
        assert steps.check(iteration, bad, None) == "not finite"
    assert steps.check(MAX_IN_A_ROW, good, None) is None
    for iteration in range(1, MAX_IN_A_ROW):
        assert steps.check(iteration, bad, None) == "not finite"
    with pytest.raises(TrainingError, match="10 updates in a row were skipped"):
        steps.check(MAX_IN_A_ROW, bad, None)
    with pytest.raises(TrainingError, match="not finite\ninspect the samples"):
        NotFinite(load_run_config(None, []), groups).check(1, bad, None)


def test_out_of_memory_error_lists_settings() -> None:
    run = load_run_config(None, ["training.micro_batch_size=4", "data.seq_length=2048"])
    groups: Any = SimpleNamespace(rank=3, tp_size=2, pp_size=1, dp_size=4)
    with pytest.raises(TrainingError) as raised, explain_out_of_memory(run, groups, 17):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has a total capacity of 139.80 GiB of which 5.50 MiB "
            "is free. Process 650 has 25.59 GiB memory in use. Including non-PyTorch memory, this process has 114.19 "
            "GiB memory in use."
        )
    text = str(raised.value)
    assert "rank 3: out of GPU memory in iteration 17" in text and "Tried to allocate 2 GiB" in text
    assert "another process holds 25.59 GiB of this GPU" in text and "process 650" in text
    advice = ("--micro-batch-size (now 4)", "--tp (now 2)", "--dist-optim", "--recompute full", "--sequence-parallel")
    assert [line for line in (*advice, "use_precision_aware_optimizer") if line not in text] == []
    assert raised.value.exit_code == 3
    done = ["training.micro_batch_size=1", "model.recompute=full", "parallel.sequence_parallel=true"]
    run = load_run_config(
        None, [*done, "parallel.tensor_model_parallel_size=2", "parallel.use_distributed_optimizer=true"]
    )
    describe = "memory in iteration {}: weights".format
    with pytest.raises(TrainingError) as raised, explain_out_of_memory(run, groups, 17, None, describe):
        raise torch.OutOfMemoryError("CUDA out of memory")
    text = str(raised.value)
    assert "\n  memory in iteration 17: weights\n" in text
    assert [line for line in ("another process", *advice) if line in text] == ["--tp (now 2)"], "is done already"
    for more, flags in (
        ((), "omit --cuda-graphs:"),
        (("model.cuda_graphs_vision=true",), "omit --cuda-graphs-vision or --cuda-graphs:"),
    ):
        run = load_run_config(None, ["model.cuda_graphs=true", *more])
        with pytest.raises(TrainingError) as raised, explain_out_of_memory(run, groups, 17):
            raise torch.OutOfMemoryError("CUDA out of memory")
        text = str(raised.value)
        assert flags in text and not re.search("--recompute|--pp", text), "they do not work with graphs"


def test_run_record() -> None:
    assert {"python", "torch", "megatron-core"} <= versions().keys()
    revision = git_revision()
    assert revision is None or len(revision.removesuffix("-dirty")) == 40


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


HANGS = """
import sys, time
from pathlib import Path
import torch
from llava_mcore.processes.watchdog import Watchdog
watchdog = Watchdog(1.0, Path(sys.argv[1]), 5)
for _ in range(4):
    watchdog.begin("a quick thing")
    time.sleep(0.4)
watchdog.begin("iteration 12")
print("ready", flush=True)
def the_culprit():
    time.sleep(60)
the_culprit()
"""


def test_a_hang_ends_the_process_and_says_where(tmp_path: Path) -> None:
    process = start(HANGS, tmp_path)
    begin = time.monotonic()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 124 and time.monotonic() - begin < 20
    assert "error: rank 5: iteration 12 took more than 1 s (--timeout)" in errors
    assert "the_culprit" in (tmp_path / "stacks" / "rank_00005.txt").read_text()


CRASHES = """
import ctypes, sys
from pathlib import Path
from llava_mcore.processes.watchdog import Watchdog
watchdog = Watchdog(60, Path(sys.argv[1]), 3)
print("ready", flush=True)
def the_culprit():
    ctypes.string_at(0)
the_culprit()
"""


def test_a_crash_in_native_code_leaves_the_stacks(tmp_path: Path) -> None:
    process = start(CRASHES, tmp_path)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGSEGV
    text = (tmp_path / "stacks" / "rank_00003.txt").read_text()
    assert "Segmentation fault" in text and "the_culprit" in text


SIGNALS = """
import sys, time
from llava_mcore.processes import control as process
process._LAST_SECONDS = 1.0
signals = process.StopSignals()
with signals:
    print("ready", flush=True)
    end = time.monotonic() + 20
    while not signals.asked and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(2)
sys.exit(130 if signals.interrupted else 75 if signals.asked else 1)
"""


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ([signal.SIGUSR1], 75),
        ([signal.SIGTERM, signal.SIGUSR1], 75),
        ([signal.SIGUSR1, signal.SIGTERM], 75),
        ([signal.SIGTERM], 143),
        ([signal.SIGINT], 130),
        ([signal.SIGUSR1, signal.SIGINT], 130),
    ],
)
def test_signals_that_stop_a_worker(sent: list[signal.Signals], code: int) -> None:
    """SIGTERM alone comes from torchrun, when another rank has failed."""
    process = start(SIGNALS)
    for number in sent:
        process.send_signal(number)
        time.sleep(0.3)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (code, "")


BUSY = """
import random, sys, threading, time
from pathlib import Path
from llava_mcore.processes import control
from llava_mcore.processes.watchdog import Watchdog
signals = control.StopSignals()
watchdog = Watchdog(60, Path(sys.argv[1]), 0)
signals.on_terminate = watchdog.write_stacks
def descend(depth):
    return sum(x for x in range(3)) if depth == 0 else (lambda: descend(depth - 1))()
def the_busy_one():
    while True:
        descend(random.randint(1, 60))
for _ in range(3):
    threading.Thread(target=the_busy_one, daemon=True).start()
print("ready", flush=True)
with signals:
    while True:
        time.sleep(0.02)
"""


def test_the_stacks_of_busy_threads_are_written_without_a_crash(tmp_path: Path) -> None:
    """While torchrun ends the ranks. faulthandler.register, which needs no lock, crashed after a dozen signals."""
    process = start(BUSY, tmp_path)
    process.send_signal(signal.SIGUSR1)  # as to a run that is asked to stop: it continues
    time.sleep(0.3)
    for _ in range(150):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.002)
    time.sleep(1)
    assert process.poll() is None
    process.kill()
    process.communicate(timeout=20)
    assert "the_busy_one" in (tmp_path / "stacks" / "rank_00000.txt").read_text()


HANGS_IN_A_CALL = """
import ctypes
from llava_mcore.processes import control as process
process._LAST_SECONDS = 1.0
signals = process.StopSignals()
print("ready", flush=True)
mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
for _ in range(2):  # the second time it waits for itself; unlike a sleep, a signal does not end that
    libc.pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_worker_that_hangs_in_a_call_ends_as_well(number: signal.Signals, code: int) -> None:
    process = start(HANGS_IN_A_CALL)
    time.sleep(1)  # until it hangs
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == code
