"""Our kernels around attention beside those of libraries.

    python -m benchmarks.kernels --json out.json

On a GPU, of one layer of 4,096 tokens (llava-1b: 32,768) or 16,384 patches in bf16. "rotary": queries, keys and values
are split, and the first two rotated; the backward pass joins their gradients, as the linear layer before takes them.
"windows": attention of patches within windows of 64. "images": attention of patches within four images, "samples":
causal attention within samples of 680 tokens, both also with room for more sequences, as CUDA graphs have. "ms" is the
time of the kernels of one pass, "GB/s" what is read and written at least, in that time, and "TF/s" the operations
without padding.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.profiler import ProfilerActivity, profile

import llava_mcore.parallel  # noqa: F401  before megatron.core
from benchmarks.record import show, write_record
from llava_mcore.models.rotary import rotate_fused, split_rotated

WINDOW = 64
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
    Layer("llava-1b", 8 * 4096, 8, 4, 64),
)
TOWERS = (Layer("Qwen3-VL-8B's tower", 16384, 16, 1, 72), Layer("Qwen2.5-VL's tower", 16384, 16, 1, 80))
IMAGES, ROOM = 4, 64
SAMPLE = 680
"""Tokens of a sample of LLaVA-1.5's data."""


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


def times(run: Callable[[], Any], inputs: Sequence[Tensor], repeats: int) -> tuple[float, float]:
    """Return the time of both passes of a function of inputs."""
    out = run()
    out = (out,) if isinstance(out, Tensor) else out
    gradients = [torch.randn_like(x, memory_format=torch.contiguous_format) for x in out]

    def forward() -> None:
        with torch.no_grad():
            run()

    def backward() -> None:
        torch.autograd.grad(out, inputs, gradients, retain_graph=True)

    return kernel_ms(forward, repeats), kernel_ms(backward, repeats)


def times_once(run: Callable[[], Tensor], inputs: Sequence[Tensor], repeats: int) -> tuple[float, float]:
    """As `times`, of a function whose backward pass can only run once."""
    gradient = torch.randn_like(run())

    def forward() -> None:
        with torch.no_grad():
            run()

    def both() -> None:
        torch.autograd.grad(run(), inputs, gradient)

    of_forward = kernel_ms(forward, repeats)
    return of_forward, kernel_ms(both, repeats) - of_forward


def row(what: str, kernels: str, found: tuple[float, float], moved: tuple[int, int]) -> dict[str, Any]:
    """Return a row of the table. `moved`: bytes that each pass reads and writes at least."""
    forward, backward = found
    return {
        "layer of": what,
        "kernels": kernels,
        "forward ms": round(forward, 4),
        "backward ms": round(backward, 4),
        "forward GB/s": round(moved[0] / forward / 1e6),
        "backward GB/s": round(moved[1] / backward / 1e6),
    }


def rotary(layer: Layer, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield a row of each variant."""
    width = (layer.queries + 2) * layer.size
    mixed = torch.randn(layer.tokens, 1, layer.groups, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    angles = torch.randn(layer.tokens, 1, 1, layer.size, device="cuda")
    moved = 2 * mixed.nbytes + angles.nbytes
    for name, split in VARIANTS.items():
        found = times(partial(split, mixed, angles, layer.size), [mixed], repeats)
        yield row(f"rotary, {layer.what}", name, found, (moved, moved))


def windows(layer: Layer, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield a row of each variant."""
    from llava_mcore.models.kernels.window_attention import WindowAttention

    shape = layer.tokens, layer.groups, layer.size
    parts = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    bounds = torch.arange(0, layer.tokens + 1, WINDOW, device="cuda", dtype=torch.int32)
    query, key, value = parts
    variants: dict[str, Callable[[], Any]] = {
        "torch's varlen_attn": lambda: varlen_attn(query, key, value, bounds, bounds, WINDOW, WINDOW),
        "ours": lambda: WindowAttention.apply(query, key, value, bounds),
    }
    for name, run in variants.items():
        yield row(
            f"windows, {layer.what}", name, times(run, parts, repeats), (4 * parts[0].nbytes, 7 * parts[0].nbytes)
        )


def attention(what: str, layer: Layer, length: int, repeats: int, *, causal: bool) -> Iterator[dict[str, Any]]:
    """Yield a row of each variant. length: of a sequence, of which the layer's tokens consist."""
    from transformer_engine.pytorch import DotProductAttention

    from llava_mcore.compat import flash_attention_4

    heads, count = layer.groups * layer.queries, layer.tokens // length
    query, key, value = parts = [
        torch.randn(count * length, n, layer.size, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for n in (heads, layer.groups, layer.groups)
    ]
    bounds = torch.arange(0, count * length + 1, length, device="cuda", dtype=torch.int32)
    roomy = torch.cat([bounds, bounds[-1:].expand(max(0, ROOM - count))])
    masked = "padding_causal" if causal else "padding"
    engine = DotProductAttention(
        heads, layer.size, num_gqa_groups=layer.groups, qkv_format="thd", attn_mask_type=masked
    )

    def by_engine(bounds: Tensor, longest: int) -> Tensor:
        lengths = {"cu_seqlens_q": bounds, "cu_seqlens_kv": bounds, "max_seqlen_q": longest, "max_seqlen_kv": longest}
        out: Tensor = engine(query, key, value, **lengths)
        return out.unflatten(1, (heads, layer.size))

    def by_torch(bounds: Tensor, longest: int) -> Tensor:
        seen = (-1, 0) if causal else (-1, -1)
        out = varlen_attn(query, key, value, bounds, bounds, longest, longest, window_size=seen)
        assert isinstance(out, Tensor)
        return out

    variants: dict[str, Callable[[Tensor, int], Tensor]] = {
        "Transformer Engine (cuDNN)": by_engine,
        "torch's varlen_attn": by_torch,
    }
    if flash_attention_4.supports(layer.size):
        options = {"scale": layer.size**-0.5, "causal": causal, "deterministic": False}
        variants["FlashAttention 4"] = partial(flash_attention_4.attend_packed, query, key, value, **options)
    products = (2 if causal else 4) * count * length**2 * heads * layer.size
    reference = by_engine(bounds, length).float()
    for name, run in variants.items():
        for room, arguments in (("", (bounds, length)), (f", room for {ROOM}", (roomy, count * length))):
            off = (run(*arguments).float() - reference).abs().max() / reference.abs().max()
            assert off < 0.02, f"{name}{room} differs by {off}"
            forward, backward = times_once(partial(run, *arguments), parts, repeats)
            yield {
                "layer of": f"{what}, {layer.what}",
                "kernels": name + room,
                "forward ms": round(forward, 4),
                "backward ms": round(backward, 4),
                "forward TF/s": round(products / forward / 1e9),
                "backward TF/s": round(2.5 * products / backward / 1e9),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU was found")
    rows = [row for layer in (*LAYERS, TOWERS[-1]) for row in rotary(layer, args.repeats)]
    rows += windows(TOWERS[-1], args.repeats)
    rows += [
        row
        for tower in TOWERS
        for row in attention("images", tower, tower.tokens // IMAGES, args.repeats, causal=False)
    ]
    rows += [row for layer in LAYERS for row in attention("samples", layer, SAMPLE, args.repeats, causal=True)]
    show(rows)
    if args.json is not None:
        write_record(args.json, rows, gpus=1)


if __name__ == "__main__":
    main()
