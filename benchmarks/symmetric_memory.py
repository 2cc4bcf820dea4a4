"""Matrix products of tensor parallelism with their messages: NCCL, and torch's symmetric memory.

    NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node 2 -m benchmarks.symmetric_memory

The products are those of a layer of LLaVA-1.5-7B with sequence parallelism, in bf16. Before the first two, each rank
gathers all tokens; after the others, it gets the sum of its part of the tokens. Prints microseconds in Markdown.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # (defines torch.ops.symm_mem)
from torch import Tensor

TOKENS, HIDDEN, MLP = 8192, 4096, 11008
TIMES = 20


def main() -> None:
    """Measure and print, on the first rank."""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    tp = dist.get_world_size()
    rows = {
        "queries, keys, values": gathered(HIDDEN, 3 * HIDDEN // tp),
        "first of the MLP": gathered(HIDDEN, 2 * MLP // tp),
        "output of attention": scattered(HIDDEN // tp, HIDDEN),
        "second of the MLP": scattered(MLP // tp, HIDDEN),
    }
    rows["together"] = [sum(times) for times in zip(*rows.values(), strict=True)]
    if rank == 0:
        print("| product | alone | with NCCL's message | symmetric memory |\n|---|---|---|---|")
        for name, times in rows.items():
            print(f"| {name} | {' | '.join(f'{x:,.0f}' for x in times)} |")
    dist.destroy_process_group()


def gathered(inputs: int, outputs: int) -> list[float]:
    """Return the microseconds of a product of all ranks' tokens."""
    group = dist.group.WORLD
    part, weight = numbers(TOKENS // group.size(), inputs), numbers(inputs, outputs)
    whole = numbers(TOKENS, inputs)

    def with_nccl() -> Tensor:
        dist.all_gather_into_tensor(whole, part)
        return whole @ weight

    fused = torch.ops.symm_mem.fused_all_gather_matmul
    return [
        microseconds(x) for x in (lambda: whole @ weight, with_nccl, lambda: fused(part, [weight], 0, group.group_name))
    ]


def scattered(inputs: int, outputs: int) -> list[float]:
    """Return the microseconds of a product whose results are added over ranks, each of which keeps some tokens."""
    group = dist.group.WORLD
    x, weight = numbers(TOKENS, inputs), numbers(inputs, outputs)
    part = numbers(TOKENS // group.size(), outputs)

    def with_nccl() -> Tensor:
        dist.reduce_scatter_tensor(part, x @ weight)
        return part

    fused = torch.ops.symm_mem.fused_matmul_reduce_scatter
    return [
        microseconds(f) for f in (lambda: x @ weight, with_nccl, lambda: fused(x, weight, "sum", 0, group.group_name))
    ]


def numbers(*shape: int) -> Tensor:
    """Return small random numbers."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02


def microseconds(compute: Callable[[], object]) -> float:
    """Return how long a call takes on the GPU, after some to warm up."""
    for _ in range(5):
        compute()
    torch.cuda.synchronize()
    dist.barrier()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(TIMES):
        compute()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / TIMES * 1e3


if __name__ == "__main__":
    main()
