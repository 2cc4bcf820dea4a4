"""What benchmarks read out of a trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.read_trace import alone, bubble, computing, gaps, predicted_bubble, read, show, spread


def event(name: str, start: float, took: float, cat: str = "kernel") -> dict[str, object]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": took}


def write(folder: Path, events: list[dict[str, object]]) -> Path:
    file = folder / "trace.json.gz"
    with gzip.open(file, "wt", encoding="utf-8") as text:
        json.dump({"traceEvents": events}, text)
    return file


def test_a_bubble_is_what_messages_take_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A forward pass, a message that lasts longer because the other stage is late, a backward pass, the optimizer."""
    events = [
        event("nvjet_forward", 0, 100),
        event("ncclDevKernel_SendRecv", 80, 80),
        event("rmsnorm", 170, 10),
        event("nvjet_backward", 180, 220),
        event("multi_tensor_adam", 400, 100),
        event("cudaStreamSynchronize", 450, 20, "cuda_runtime"),
        event("aten::mm", 0, 500, "cpu_op"),
    ]
    trace = read(write(tmp_path, events))
    assert bubble(trace) == 60 / 400
    assert list(gaps(trace.kernels, 0, 500)) == [(10, 160, "rmsnorm")]
    assert alone(trace.kernels, "rmsnorm", 0, 500) == 10
    show(trace)
    printed = capsys.readouterr().out
    assert (
        "15.0 % of the time of all passes" in printed
        and "cudaStreamSynchronize: 1; at ms (took ms): 0 (0.0)" in printed
    )


def test_spread_leaves_out_what_waits_for_other_ranks(tmp_path: Path) -> None:
    """One rank computes for 300 of 500 microseconds, the other for 400, one kernel beside a message."""
    slower = [event("nvjet_a", 0, 400), event("ncclDevKernel_AllReduce", 380, 120)]
    faster = [
        event("nvjet_a", 0, 200),
        event("ncclDevKernel_AllReduce", 150, 300),
        event("multi_tensor_adam", 400, 100),
    ]
    traces = []
    for number, events in enumerate((slower, faster)):
        (tmp_path / str(number)).mkdir()
        traces.append(read(write(tmp_path / str(number), events)))
    assert [computing(trace) for trace in traces] == [400, 300]
    assert spread(traces) == 400 / 350


def test_predicted_bubble() -> None:
    """It is (stages - 1) / (micro-batches + stages - 1)."""
    assert predicted_bubble(1, 8) == 0
    assert predicted_bubble(2, 8) == 1 / 9


def test_a_trace_of_a_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no kernels of a GPU"):
        read(write(tmp_path, [event("aten::mm", 0, 5, "cpu_op")]))
