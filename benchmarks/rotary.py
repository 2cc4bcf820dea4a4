"""Splitting queries, keys and values and rotating the first two: our kernel beside Transformer Engine's.

    python -m benchmarks.rotary --json out.json

On a GPU, of one layer of 4,096 tokens or 16,384 patches in bf16. "ms" is the time of the kernels of one pass, the
backward pass with the gradients of query, key and value joined, as the linear layer before takes them; "GB/s" what is
read and written at least, in that time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import llava_mcore.parallel  # noqa: F401  before megatron.core
from benchmarks.record import show, write_record
from llava_mcore.models.rotary import rotate_fused, split_rotated

Split = Callable[[Tensor, Tensor, int], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Layer:
    """Tokens, groups of heads, query heads of a group, head size."""

    what: str
    tokens: int
    groups: int
    queries: int
    size: int


LAYERS = (
    Layer("LLaVA-1.5-7B", 4096, 32, 1, 128),
    Layer("Qwen2.5-VL-7B", 4096, 4, 7, 128),
    Layer("Qwen2.5-VL's tower", 16384, 16, 1, 80),
)


def two_kernels(mixed: Tensor, angles: Tensor, size: int) -> tuple[Tensor, ...]:
    """Split by torch, rotated by Transformer Engine one after the other, as megatron-core has it."""
    query, key, value = mixed.split([mixed.shape[-1] - 2 * size, size, size], dim=-1)
    query = query.reshape(*query.shape[:2], -1, size)
    return rotate_fused(query, angles), rotate_fused(key, angles), value


def one_kernel(mixed: Tensor, angles: Tensor, size: int) -> tuple[Tensor, ...]:
    """Transformer Engine's kernel for all three."""
    from transformer_engine.pytorch.attention.rope import apply_fused_qkv_rotary_pos_emb

    return apply_fused_qkv_rotary_pos_emb(mixed, angles, angles, [mixed.shape[-1] - 2 * size, size, size])


VARIANTS: dict[str, Split] = {
    "Transformer Engine, each": two_kernels,
    "Transformer Engine, all": one_kernel,
    "ours": split_rotated,
}


def kernel_ms(run: Callable[[], object], repeats: int) -> float:
    """Return the time of the kernels that one call starts."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in found.key_averages()) / repeats / 1e3


def row(layer: Layer, name: str, split: Split, repeats: int) -> dict[str, Any]:
    """Measure one variant."""
    width = (layer.queries + 2) * layer.size
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    mixed = torch.randn(layer.tokens, 1, layer.groups, width, **options).requires_grad_()
    angles = torch.randn(layer.tokens, 1, 1, layer.size, device="cuda")
    out = split(mixed, angles, layer.size)
    gradients = [torch.randn_like(x, memory_format=torch.contiguous_format) for x in out]

    def forward() -> None:
        with torch.no_grad():
            split(mixed, angles, layer.size)

    def backward() -> None:
        torch.autograd.grad(out, mixed, gradients, retain_graph=True)

    times = [kernel_ms(forward, repeats), kernel_ms(backward, repeats)]
    moved = 2 * mixed.numel() * mixed.element_size() + angles.numel() * angles.element_size()
    speeds = [round(moved / ms / 1e6) for ms in times]
    return {
        "layer of": layer.what,
        "kernels": name,
        "forward ms": round(times[0], 4),
        "backward ms": round(times[1], 4),
        "forward GB/s": speeds[0],
        "backward GB/s": speeds[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU was found")
    rows = [row(layer, name, split, args.repeats) for layer in LAYERS for name, split in VARIANTS.items()]
    show(rows)
    if args.json is not None:
        write_record(args.json, rows, gpus=1)


if __name__ == "__main__":
    main()
