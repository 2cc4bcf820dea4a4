"""What `train_step.py` has measured of each configuration, as rows of a table."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import read_trace

PEERS = {
    "hf": "Hugging Face, packed",
    "hf-fp8": "Hugging Face, packed, float8",
    "hf-padded": "Hugging Face, padded",
}
PRODUCTS = {"swift": "Megatron-SWIFT", "lmms": "lmms-engine", "automodel": "NeMo Automodel", "veomni": "VeOmni"}


@dataclass
class Entry:
    """One configuration and the steps that were measured of it."""

    shape: str
    what: str
    """fp8 recipe of ours, or the peer."""
    tp: int
    pp: int
    micro_batch_size: int
    global_batch_size: int
    whole_towers: bool = False
    """Of ours: --vision-data-parallel."""
    graphs: str = "off"
    """Of ours: what are CUDA graphs; a choice of --cuda-graphs."""
    cp: int = 1
    """Of ours: ranks that divide samples."""
    fsdp: str = "none"
    """Of ours: what --fsdp divides."""
    overlap: str = "off"
    """Of ours: whether tensor parallelism's messages overlap with products; a choice of --tp-comm-overlap."""
    steps: list[dict[str, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    bubbles: list[float] = field(default_factory=list)
    """Measured, as a fraction of the time of all passes."""
    spreads: list[float] = field(default_factory=list)
    """Of the time for which ranks compute in a step: the slowest ÷ the mean."""
    error: str = ""
    stack: str = ""
    """Of a peer: its components."""

    @property
    def is_peer(self) -> bool:
        return self.what in PEERS or self.what in PRODUCTS


def row_of(args: argparse.Namespace, entry: Entry, entries: Sequence[Entry]) -> dict[str, Any]:
    """Return the medians of an entry, and its speed as a multiple of our first one's and of each peer's."""
    gpus = args.gpus
    row: dict[str, Any] = {"shape": entry.shape, "what": (PEERS | PRODUCTS).get(entry.what, entry.what)}
    row |= {"tp": entry.tp, "pp": entry.pp, "dp": gpus // (entry.tp * entry.cp * entry.pp)}
    if args.cp != [1] and not entry.is_peer:
        row |= {"cp": entry.cp}
    row |= {"mbs": entry.micro_batch_size, "gbs": entry.global_batch_size}
    if args.ep > 1 and (not entry.is_peer or entry.what == "swift"):
        row |= {"ep": args.ep}
    if args.vision_data_parallel:
        row |= {"tower": "whole" if entry.whole_towers else "divided"}
    if args.tp_comm_overlap != ["off"] and not entry.is_peer:
        row |= {"overlap": entry.overlap}
    if args.fsdp != ["none"] and not entry.is_peer:
        row |= {"fsdp": entry.fsdp}
    if args.cuda_graphs != ["off"] and not entry.is_peer:
        row |= {"graphs": entry.graphs}
    if not entry.steps:
        return row | {"error": entry.error}

    def median(name: str, scale: float = 1.0, digits: int = 1) -> float:
        return round(scale * statistics.median(step[name] for step in entry.steps), digits)

    row |= {
        "tok/s/GPU": round(speed(entry, "tokens") / gpus),
        "samples/s": round(speed(entry, "samples"), 1),
        **({} if entry.what in PRODUCTS else {"TF/s/GPU": median("tflops"), "MFU %": median("mfu", 100)}),
        "s/step": median("seconds", digits=3),
        "GiB": median("memory"),
    }
    if entry.is_peer:
        row |= {"fill": median("fill", digits=4)} if entry.what in PRODUCTS else {}
        row |= {"stack": entry.stack}
    else:
        row |= {"wait %": median("waited", 100), "fill": median("fill", digits=4)}
        first = next(other for other in entries if other.shape == entry.shape and other.losses)
        if first is not entry:
            row |= {"÷ first": round(speed(entry, "tokens") / speed(first, "tokens"), 3)}
            row |= {"loss off %": loss_off(entry, first)} if args.weights else {}
        plain = without_graphs(entry, entries)
        row |= {"loss off %": loss_off(entry, plain)} if plain is not None else {}
    if entry.bubbles:
        replica = entry.tp * entry.cp * entry.pp
        micro_batches = entry.global_batch_size * replica // (entry.micro_batch_size * gpus)
        row |= {"bubble %": round(100 * statistics.median(entry.bubbles), 1)}
        row |= {"predicted %": round(100 * read_trace.predicted_bubble(entry.pp, micro_batches), 1)}
    if entry.spreads:
        row |= {"slowest ÷ mean": round(statistics.median(entry.spreads), 3)}
    for other in entries:
        if other.is_peer and other.steps and other.shape == entry.shape and not entry.is_peer:
            unit = "samples" if other.what == "hf-padded" else "tokens"
            row[f"÷ {other.what}"] = round(speed(entry, unit) / speed(other, unit), 3)
    return row | {"loss": entry.losses, "steps": len(entry.steps)}


def without_graphs(entry: Entry, entries: Sequence[Entry]) -> Entry | None:
    """Return the entry without graphs that is otherwise as one with graphs; None without such an entry."""

    def held(x: Entry) -> tuple[object, ...]:
        return x.shape, x.what, x.tp, x.cp, x.pp, x.micro_batch_size, x.whole_towers, x.fsdp, x.overlap

    return next(
        (x for x in entries if x.graphs == "off" != entry.graphs and x.losses and held(x) == held(entry)),
        None,
    )


def loss_off(entry: Entry, first: Entry) -> float:
    """Return the largest difference of a step's loss from the first entry's, in percent of it."""
    return round(max(100 * abs(a / b - 1) for a, b in zip(entry.losses, first.losses, strict=True)), 2)


def speed(entry: Entry, unit: str) -> float:
    """Return tokens or samples per second of all GPUs, the median of the steps."""
    return statistics.median(step[unit] / step["seconds"] for step in entry.steps)
