"""Rates of the GPUs at hand, for `plan --calibrate`: products, attention, memory, messages."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from llava_mcore.errors import ConfigError
from llava_mcore.plan.hardware.calibration import Calibration
from llava_mcore.plan.hardware.gpus import GPUS, gpu_of_device
from llava_mcore.processes.local_world import enter, run_world

REPEATS = 20
SIDE = 8192
"""Rows and columns of the matrices."""
TOKENS, HEADS, HEAD_SIZE = 4096, 32, 128
COPIED = 1 << 30
"""Bytes of the tensor that is copied; far more than a cache holds."""
MESSAGE = 1 << 28
"""Bytes that are summed over the GPUs."""
WARM_UP_SECONDS = 2.0
"""Before the clocks of a GPU are those of a long run."""


def measure() -> Calibration:
    """Measure all GPUs of this machine; takes less than a minute.

    Raises:
        ConfigError: there is no GPU, or its published peaks are not known.
    """
    if not torch.cuda.is_available():
        raise ConfigError("--calibrate measures the GPUs of this machine, and none was found: run it where they are")
    device = torch.cuda.get_device_name()
    gpu = gpu_of_device(device)
    if gpu is None:
        raise ConfigError(
            f"--calibrate: {device} is not in the table of GPUs, so its peaks are not known: {', '.join(GPUS)}"
        )
    cuda = torch.device("cuda", 0)
    warm_up(cuda)
    products, fp8 = product_rate(cuda), fp8_rate(cuda) if gpu.fp8 is not None else None
    attention, memory = attention_rate(cuda), copy_rate(cuda)
    count = torch.cuda.device_count()
    return Calibration(
        device=device,
        products=products / gpu.bf16,
        attention=attention / gpu.bf16,
        memory=memory / gpu.bandwidth,
        products_fp8=None if fp8 is None or gpu.fp8 is None else fp8 / gpu.fp8,
        link=link_rate(count) / gpu.link if count > 1 else None,
        num_gpus=count,
    )


def warm_up(device: torch.device) -> None:
    """Keep the device busy until its clocks have settled."""
    x = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16)
    end = time.monotonic() + WARM_UP_SECONDS
    while time.monotonic() < end:
        for _ in range(50):
            torch.mm(x, x)
        _wait(device)


def seconds_of(task: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Return the median time of a task; the first passes, in which kernels are chosen, do not count."""
    for _ in range(3):
        task()
    times = []
    for _ in range(repeats):
        _wait(device)
        begin = time.perf_counter()
        task()
        _wait(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def product_rate(device: torch.device, side: int = SIDE, repeats: int = REPEATS) -> float:
    """Return FLOP/s of products of square matrices in bf16."""
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * side**3 / seconds_of(lambda: torch.mm(a, b), device, repeats)


def fp8_rate(device: torch.device, side: int = SIDE) -> float:
    """Return the same in FP8 (e4m3), with one scale per matrix."""
    a, b = (torch.randn(side, side, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)

    def product() -> Tensor:  # the second matrix in the order of columns, as the kernel needs it
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)

    return 2 * side**3 / seconds_of(product, device)


def attention_rate(device: torch.device, tokens: int = TOKENS, heads: int = HEADS, repeats: int = REPEATS) -> float:
    """Return FLOP/s of causal attention, both passes, of which the backward one counts 2.5 times."""
    q, k, v = (
        torch.randn(1, heads, tokens, HEAD_SIZE, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )

    def both_passes() -> None:
        result = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(result, (q, k, v), torch.ones_like(result))

    flops = 3.5 * 4 * tokens * (tokens + 1) / 2 * heads * HEAD_SIZE
    return flops / seconds_of(both_passes, device, repeats)


def copy_rate(device: torch.device, num_bytes: int = COPIED, repeats: int = REPEATS) -> float:
    """Return the bytes/s that are read and written in a copy."""
    source = torch.empty(num_bytes, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_of(lambda: target.copy_(source), device, repeats)


def link_rate(count: int, num_bytes: int = MESSAGE) -> float:
    """Return the bytes/s that every device of this machine sends in a sum over all of them, by a process each.

    Args:
        count: number of processes; CPUs without GPUs.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rate"
        run_world(_exchange, count, result, num_bytes, on_gpus=torch.cuda.is_available())
        return float(result.read_text(encoding="utf-8"))


def _exchange(rank: int, count: int, port: int, result: Path, num_bytes: int) -> None:
    """Sum a tensor over all processes; the first one writes the bytes/s that it has sent."""
    enter(rank, count, port)
    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo", rank=rank, world_size=count)
    try:
        x = torch.zeros(num_bytes // 2, device=device, dtype=torch.bfloat16)
        seconds = seconds_of(lambda: dist.all_reduce(x), device, repeats=10)
    finally:
        dist.destroy_process_group()
    # A ring scatters and gathers: every process sends this part of the tensor twice.
    if rank == 0:
        result.write_text(str(2 * num_bytes * (count - 1) / count / seconds), encoding="utf-8")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
