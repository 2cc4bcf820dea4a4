"""Output layer + loss, forward and backward: peak memory and time of ours, compared with the plain one and the peers'.

    python -m benchmarks.linear_cross_entropy --json out.json

On a GPU 8192 tokens x hidden 4096 x vocabulary 32000 and 152064 in bf16; without one a small size, timed only. The
peak is what is allocated above the inputs (hidden states, weight and its main_grad), gradients included. Every
variant computes the sum of the losses of the same trained tokens; the variants alternate, and the median of the rounds
is shown. megatron-core 0.19 has no linear cross-entropy of its own: its rows are its losses after the plain head.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import llava_mcore.parallel  # noqa: F401  before megatron.core
from benchmarks.record import show, write_record
from llava_mcore.models.loss.linear_cross_entropy import CHUNK_TOKENS, linear_cross_entropy

BASE = "plain head + megatron-core loss"
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def plain(loss: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    """Put a loss of logits [s, 1, vocabulary] after the plain head."""

    def run(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return (loss(F.linear(hidden, weight), labels.transpose(0, 1)).transpose(0, 1).float() * mask).sum()

    return run


def torch_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Hugging Face's way: fp32 logits, torch's cross-entropy."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


def ours(chunk_tokens: int, world: dist.ProcessGroup, num_trained: int | None = None, adds: bool = False) -> Loss:
    """Our function at one chunk size, over all tokens or over this many trained ones.

    Args:
        adds: the weight's gradient is added to `main_grad`, as in training; the others' would still have to be.
    """

    def run(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden,
            weight,
            labels,
            mask,
            vocab_size=weight.shape[0],
            tp_group=world,
            num_trained=num_trained,
            chunk_tokens=chunk_tokens,
            adds_to_main_grad=adds,
        )[0]

    return run


def liger() -> Loss:
    """Liger's fused linear cross-entropy."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")

    def run(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return loss(weight, hidden.flatten(0, 1), labels.where(mask > 0, -100).flatten())

    return run


def variants(device: str, chunk_sizes: list[int], world: dist.ProcessGroup, num_trained: int) -> dict[str, Loss]:
    """Everything that runs here, the baseline first."""
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    found: dict[str, Loss] = {BASE: plain(lambda x, y: vocab_parallel_cross_entropy(x, y, tp_group=world))}
    found["plain head + torch loss"] = plain(torch_loss)
    for size in chunk_sizes:
        found[f"ours, chunks of {size}"] = ours(size, world)
        found[f"ours, chunks of {size}, added to main_grad"] = ours(size, world, adds=True)
        found[f"ours, chunks of {size}, added to main_grad, trained tokens only"] = ours(
            size, world, num_trained, adds=True
        )
    if device == "cpu":
        return found
    fused = plain(lambda x, y: fused_vocab_parallel_cross_entropy(x, y, world))
    found["plain head + megatron-core fused loss"] = fused
    if importlib.util.find_spec("transformer_engine") is not None:
        from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

        found["plain head + Transformer Engine loss"] = plain(lambda x, y: parallel_cross_entropy(x, y.contiguous()))
    if importlib.util.find_spec("liger_kernel") is not None:
        found["Liger"] = liger()
    return found


def inputs(device: str, dtype: torch.dtype, tokens: int, hidden: int, vocab: int) -> tuple[Tensor, ...]:
    """Return hidden [s, 1, h], weight [vocabulary, h], labels and mask [1, s]; three of five tokens are trained."""
    torch.manual_seed(0)
    states = torch.randn(tokens, 1, hidden, device=device, dtype=dtype).requires_grad_()
    weight = torch.nn.Parameter(torch.empty(vocab, hidden, device=device, dtype=dtype).normal_(0, 0.02))
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    labels = torch.randint(0, vocab, (1, tokens), device=device)
    return states, weight, labels, (torch.rand(1, tokens, device=device) < 0.6).float()


def once(loss: Loss, given: tuple[Tensor, ...]) -> tuple[float, float, float | None]:
    """Return the loss per trained token, milliseconds and peak GiB of one forward and backward pass."""
    on_gpu = given[0].is_cuda
    given[0].grad = given[1].grad = None
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    total = loss(*given)
    total.backward()
    if on_gpu:
        torch.cuda.synchronize()
    milliseconds = (time.perf_counter() - start) * 1e3
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if on_gpu else None
    return (total / given[3].sum()).item(), milliseconds, peak


def measure(losses: dict[str, Loss], given: tuple[Tensor, ...], rounds: int) -> list[dict[str, Any]]:
    """Run all variants in turn, `rounds` times after three warm-ups."""
    times: dict[str, list[float]] = {name: [] for name in losses}
    last: dict[str, tuple[float, float | None]] = {}
    for i in range(rounds + 3):
        for name, loss in losses.items():
            value, milliseconds, peak = once(loss, given)
            last[name] = value, peak
            if i >= 3:
                times[name].append(milliseconds)
    medians = {name: statistics.median(x) for name, x in times.items()}
    base = last[BASE][1]
    found = []
    for name, (loss_found, peak) in last.items():
        row = {"vocabulary": given[1].shape[0], "variant": name, "loss": round(loss_found, 4)}
        if peak is not None and base is not None:
            row |= {"peak GiB": round(peak, 2), "peak ÷ plain": round(peak / base, 2)}
        found.append(row | {"ms": round(medians[name], 2), "ms ÷ plain": round(medians[name] / medians[BASE], 3)})
    return found


def main() -> None:
    """Parse the command line, measure, print, write."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Output layer and loss: memory and time")
    parser.add_argument("--tokens", type=int, default=8192 if on_gpu else 512)
    parser.add_argument("--hidden", type=int, default=4096 if on_gpu else 128)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32000, 152064] if on_gpu else [4096])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16" if on_gpu else "float32")
    parser.add_argument("--chunk-tokens", type=int, nargs="+", default=[CHUNK_TOKENS, 2 * CHUNK_TOKENS])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = "cuda" if on_gpu else "cpu"
    dist.init_process_group("nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.new_group()
    rows: list[dict[str, Any]] = []
    for vocab in args.vocab:
        given = inputs(device, getattr(torch, args.dtype), args.tokens, args.hidden, vocab)
        num_trained = int(given[3].sum().item())
        rows += measure(variants(device, args.chunk_tokens, world, num_trained), given, args.rounds)
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    print(f"{name}, torch {torch.__version__}: {args.tokens} tokens x hidden {args.hidden}, {args.dtype}\n")
    show(rows)
    if args.json is not None:
        write_record(args.json, rows, gpus=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
