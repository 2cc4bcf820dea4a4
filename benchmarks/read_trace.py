"""Where the time of a step went, from the trace that `run.py --profile 5:5 logging.profile_ranks=0` writes.

    python -m benchmarks.read_trace RUN/profile/rank_00000.iterations_5-5.trace.json.gz

Prints the time of the GPU's kernels by kind, how long the GPU was idle, and every call that waits for the GPU:
there must be none between the first forward pass and the optimizer. Recording takes the host time, so where the host
limits a step, the step in the trace is longer than others.

Rank 0 is in the first pipeline stage, which waits for the others only between its first forward and its last backward
pass: the time in which messages between stages ran and nothing else is the pipeline's bubble.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

KINDS = {
    "communication": r"nccl",
    "attention": r"fmha|flash|cudnn.*(sdpa|attn)|attention",
    "products of experts": r"GroupProblemShape",
    "routers and dispatch": r"permute_kernel|topk|bitonic|radix",
    "quantization": r"^_(rows|matrices)$|cast_transpose|quantize",
    "matrix products": r"gemm|cutlass|nvjet|cublas|xmma",
    "sums of gradients": r"unrolled_elementwise_kernel<at::native::CUDAFunctor_add<float>|^_add$",
    "optimizer": r"multi_tensor|adam|l2norm",
    "copies and fills": r"memcpy|memset|copy_|fill|CatArray|direct_copy",
    "norms": r"norm",
    "rotary, activations, loss": r"rope|rotary|silu|swiglu|gelu|softmax|cross_entropy|act_and_mul|dgated|gated",
}
"""Kind -> what the names of its kernels contain; the first one that fits."""
PRODUCTS = ("products of experts", "matrix products")
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
MESSAGES = r"SendRecv"
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::item", "aten::nonzero")


@dataclass(frozen=True)
class Span:
    """An event and its duration, in microseconds."""

    name: str
    start: float
    end: float

    @property
    def took(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Trace:
    """What a GPU did, and when the host waited for it."""

    kernels: list[Span]
    waits: list[Span]

    @property
    def begin(self) -> float:
        return min(kernel.start for kernel in self.kernels)

    @property
    def end(self) -> float:
        return max(kernel.end for kernel in self.kernels)


def read(file: Path) -> Trace:
    """Read torch's trace.

    Raises:
        SystemExit: it holds no kernels of a GPU.
    """
    with gzip.open(file, "rt", encoding="utf-8") as text:
        events = [event for event in json.load(text)["traceEvents"] if event.get("ph") == "X" and event["dur"] > 0]
    spans = [(event.get("cat"), Span(event["name"], event["ts"], event["ts"] + event["dur"])) for event in events]
    trace = Trace([span for cat, span in spans if cat in ON_GPU], [span for _, span in spans if span.name in WAITS])
    if not trace.kernels:
        raise SystemExit(f"{file}: holds no kernels of a GPU; only runs on GPUs can be summarized")
    return trace


def kind_of(name: str) -> str:
    """Return the kind of a kernel by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def gaps(kernels: Sequence[Span], begin: float, end: float) -> Iterator[tuple[float, float, str]]:
    """Yield when none of the kernels ran between two times: how long, from when, and the kernel that came next."""
    reached = begin
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        if min(kernel.start, end) > reached:
            yield min(kernel.start, end) - reached, reached, kernel.name
        reached = max(reached, kernel.end)
    if end > reached:
        yield end - reached, reached, "the end"


def alone(kernels: Sequence[Span], pattern: str, begin: float, end: float) -> float:
    """Return for how long between two times kernels with such a name ran and no other did."""
    others = [kernel for kernel in kernels if not re.search(pattern, kernel.name)]
    return sum(took for took, *_ in gaps(others, begin, end)) - sum(took for took, *_ in gaps(kernels, begin, end))


def bubble(trace: Trace) -> float:
    """Return the bubble's part of the time of all passes, first kernel to last matrix product, of the first stage."""
    end = max(kernel.end for kernel in trace.kernels if kind_of(kernel.name) in PRODUCTS)
    return alone(trace.kernels, MESSAGES, trace.begin, end) / (end - trace.begin)


def computing(trace: Trace) -> float:
    """Return for how long kernels ran that are not messages between ranks, which wait for the other ranks."""
    kernels = [kernel for kernel in trace.kernels if kind_of(kernel.name) != "communication"]
    return trace.end - trace.begin - sum(took for took, *_ in gaps(kernels, trace.begin, trace.end))


def spread(traces: Sequence[Trace]) -> float:
    """Return how much longer the slowest rank computes than the mean of all."""
    times = [computing(trace) for trace in traces]
    return max(times) * len(times) / sum(times)


def predicted_bubble(stages: int, micro_batches: int) -> float:
    """Return the bubble's part of the time of all passes if all stages take equally long and messages no time.

    Each stage works for m micro-batches and waits for p - 1 (Narayanan et al. 2021, section 2.2). Not interleaved.
    """
    return (stages - 1) / (micro_batches + stages - 1)


def show(trace: Trace) -> None:
    """Print kernels by kind, the GPU's idle time, and what waited."""
    begin, end = trace.begin, trace.end
    table, console = Table("kernels", "ms", "% of the step", "number"), Console(width=140)
    by_kind: dict[str, list[float]] = {}
    longest: dict[str, list[float]] = {}
    for kernel in trace.kernels:
        by_kind.setdefault(kind_of(kernel.name), []).append(kernel.took)
        longest.setdefault(kernel.name[:110], []).append(kernel.took)
    for kind, times in sorted(by_kind.items(), key=lambda item: -sum(item[1])):
        table.add_row(kind, f"{sum(times) / 1e3:.1f}", f"{100 * sum(times) / (end - begin):.1f}", str(len(times)))
    console.print(table)
    idle = sorted(gaps(trace.kernels, begin, end), reverse=True)
    without_work = sum(took for took, *_ in idle)
    console.print(f"messages between stages alone: {100 * bubble(trace):.1f} % of the time of all passes")
    console.print(f"step {(end - begin) / 1e3:.1f} ms, GPU without work {without_work / 1e3:.1f} ms, most of it:")
    for took, start, name in idle[:10]:
        console.print(f"{took / 1e3:9.1f} ms at {(start - begin) / 1e3:7.0f} before {name[:90]}", markup=False)
    for name, times in sorted(longest.items(), key=lambda item: -sum(item[1]))[:24]:
        console.print(f"{sum(times) / 1e3:9.1f} ms {len(times):6d} x {name}", markup=False, highlight=False)
    for name in WAITS:
        waits = sorted((wait for wait in trace.waits if wait.name == name), key=lambda wait: wait.start)
        places = [f"{(wait.start - begin) / 1e3:.0f} ({wait.took / 1e3:.1f})" for wait in waits]
        console.print(f"{name}: {len(waits)}; at ms (took ms): {', '.join(places[:20])}")


def main() -> None:
    """Read the trace and print what is in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    show(read(parser.parse_args().trace))


if __name__ == "__main__":
    main()
