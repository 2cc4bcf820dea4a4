"""Where the time of a training step goes, by torch's profiler, on rank 0 of a real run.

    torchrun --nproc-per-node 2 -m benchmarks.profile_step --config run.yaml --step 5 --out folder

It runs the training process itself with one step profiled, writes folder/trace.json.gz, and prints the time of the
GPU's kernels by kind, how long the GPU had nothing to do, and every call in the step that waits for the GPU: none may
stand between the first forward pass and the optimizer. `run.py … --dry-run` prints a run.yaml; every run has its own.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from llava_mcore.apps import worker
from llava_mcore.config.load import load_run_config
from llava_mcore.training import loop

KINDS = {
    "communication": r"nccl",
    "attention": r"fmha|flash|cudnn.*(sdpa|attn)|attention",
    "matrix products": r"gemm|cutlass|nvjet|cublas|xmma",
    "optimizer": r"multi_tensor|adam|l2norm",
    "copies and fills": r"memcpy|memset|copy_|fill|CatArray|direct_copy",
    "norms": r"norm",
    "rotary, activations, loss": r"rope|rotary|silu|swiglu|gelu|softmax|cross_entropy|act_and_mul|dgated|gated",
}
"""Kind -> what the names of its kernels contain; the first one that fits."""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::item", "aten::nonzero")


def kind_of(name: str) -> str:
    """Return the kind of a kernel by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")


class OneStep:
    """Wraps the training step: the n-th call is profiled."""

    def __init__(self, step: Callable[..., Any], number: int, out: Path) -> None:
        self._step, self._number, self._out, self._calls = step, number, out, 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self._calls += 1
        if self._calls != self._number or os.environ["RANK"] != "0":
            return self._step(*args, **options)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            result = self._step(*args, **options)
        self._out.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(self._out / "trace.json.gz"))
        show(list(found.events()))
        return result


def show(events: Sequence[Any]) -> None:
    """Print kernels by kind, the GPU's idle time, and what waited."""
    kernels = [e for e in events if e.device_type == DeviceType.CUDA and not e.name.startswith(("aten::", "##"))]
    kernels = [k for k in kernels if k.time_range.elapsed_us() > 0 and not k.is_user_annotation]
    begin, end = min(k.time_range.start for k in kernels), max(k.time_range.end for k in kernels)
    idle = gaps(kernels)
    table, console = Table("kernels", "ms", "% of the step", "number"), Console(width=140)
    by_kind: dict[str, list[float]] = {}
    for kernel in kernels:
        by_kind.setdefault(kind_of(kernel.name), []).append(kernel.time_range.elapsed_us())
    for kind, times in sorted(by_kind.items(), key=lambda item: -sum(item[1])):
        table.add_row(kind, f"{sum(times) / 1e3:.1f}", f"{100 * sum(times) / (end - begin):.1f}", str(len(times)))
    console.print(table)
    without_work = sum(took for took, *_ in idle)
    console.print(f"step {(end - begin) / 1e3:.1f} ms, GPU without work {without_work / 1e3:.1f} ms, most of it:")
    for took, start, name in idle[:10]:
        console.print(f"{took / 1e3:9.1f} ms at {(start - begin) / 1e3:7.0f} before {name[:90]}", markup=False)
    longest: dict[str, list[float]] = {}
    for kernel in kernels:
        longest.setdefault(kernel.name[:110], []).append(kernel.time_range.elapsed_us())
    for name, times in sorted(longest.items(), key=lambda item: -sum(item[1]))[:24]:
        console.print(f"{sum(times) / 1e3:9.1f} ms {len(times):6d} x {name}", markup=False, highlight=False)
    for name in WAITS:
        waits = sorted((e for e in events if e.name == name), key=lambda e: e.time_range.start)
        places = [f"{(e.time_range.start - begin) / 1e3:.0f} ({e.time_range.elapsed_us() / 1e3:.1f})" for e in waits]
        console.print(f"{name}: {len(waits)}; at ms (took ms): {', '.join(places[:20])}")


def gaps(kernels: Sequence[Any]) -> list[tuple[float, float, str]]:
    """Return when the GPU had nothing to do, longest first: us, from when, and the kernel that ended it."""
    spans = sorted((k.time_range.start, k.time_range.end, k.name) for k in kernels)
    found, reached = [], spans[0][0]
    for start, end, name in spans:
        if start > reached:
            found.append((start - reached, reached, name))
        reached = max(reached, end)
    return sorted(found, reverse=True)


def main() -> int:
    """Run the training process with one step profiled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=int, default=5, help="which call of the training step is profiled")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", type=Path, required=True, help="resolved run.yaml")
    args = parser.parse_args()
    load_run_config(args.config, [], {}).run_dir.mkdir(parents=True, exist_ok=True)
    loop.train_step = OneStep(loop.train_step, args.step, args.out)
    return worker.main(["--config", str(args.config)])


if __name__ == "__main__":
    raise SystemExit(main())
