"""Speed of loading, compared with a bare loop that only decodes and resizes the same images; fill; memory.

    python -m benchmarks.data --json out.json
    python -m benchmarks.data --only memory --memory-samples 200000

`prepare` writes the shards with the tokenizer of training, as for a user. The bare loop (`data_bare`) decodes
with Pillow, as Hugging Face's processors do; a second one with torchvision, as the loader does where that gives the
same bits. Bare loops and loader alternate, and medians of the rounds are shown, since other work on the machine
disturbs all of them; CPU time per sample is disturbed least. Needs scikit-learn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.data_bare import CROPPED, BareProcesses, Speed, pillow, torchvision
from benchmarks.data_fill import fill
from benchmarks.data_material import make_hf_assets, make_pictures, make_samples, prepare_shards
from benchmarks.data_memory import WorkerMemory, memory_over_samples
from benchmarks.material import write_shards
from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import Assets, load_assets
from llava_mcore.data.loader.train_loader import TrainLoader

SIZES = {"640x480": (640, 480), "336x336": (336, 336)}
WORKERS = (0, 1, 2)
PARTS = ("speed", "fill", "memory")


@dataclass(frozen=True)
class Round:
    """Stretches of work one after the other: both bare loops and the loader."""

    pillow: Speed
    ours: Speed
    torchvision: Speed


@dataclass(frozen=True)
class Row:
    """Medians of the rounds for one kind of images, packing and number of loader processes."""

    pictures: str
    packing: bool
    workers: int
    bare_per_s: float
    """With Pillow's decoder."""
    ours_per_s: float
    ratio: float
    cpu_ratio: float
    same_decoder_ratio: float
    """Against the bare loop with torchvision's decoder."""
    same_decoder_cpu_ratio: float
    bare_cpu_ms: float
    """CPU time per image in the bare loop with torchvision's decoder."""
    ours_cpu_ms: float
    """CPU time per sample, including that of the process that takes the batches."""
    tokens_per_s: float
    first_batch_s: float


class Ours:
    """A loader, as training opens it with its defaults."""

    def __init__(self, path: Path, assets: Assets, *, packing: bool, workers: int, options: argparse.Namespace) -> None:
        data = DataConfig(path=path, seq_length=options.seq_length, num_workers=workers, packing=packing)
        size = 1 if packing else options.micro_batch_size
        begin = time.perf_counter()
        self._loader = TrainLoader(data, assets, micro_batch_size=size, dp_rank=0, dp_size=1, seed=1)
        next(self._loader)
        self.first_batch = time.perf_counter() - begin
        for _ in range(self._loader.num_streams):  # every stream fills its buffers with its first batch
            next(self._loader)

    def run(self, seconds: float) -> Speed:
        """Take batches for so long."""
        begin, cpu, samples, tokens = time.perf_counter(), cpu_seconds(), 0, 0
        while time.perf_counter() - begin < seconds:
            batch = next(self._loader)
            samples, tokens = samples + len(batch.sample_keys), tokens + batch.num_tokens
        return Speed(samples, tokens, time.perf_counter() - begin, cpu_seconds() - cpu)

    def close(self) -> None:
        self._loader.close()


def cpu_seconds() -> float:
    """CPU time of this process and of those that it has started and that still run."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    times = [process.cpu_times() for process in processes]
    return sum(t.user + t.system for t in times)


def measure_speed(root: Path, assets: Assets, pictures: str, options: argparse.Namespace) -> list[Row]:
    """Return the rows for images of one size, which are in `root`."""
    jpegs = make_pictures([SIZES[pictures]], options.num_pictures)
    samples = make_samples(options.num_samples, jpegs, text_only=0, median_tokens=options.median_tokens)
    path = prepare_shards(
        write_shards(root / pictures / "source", samples, num_shards=8), root / pictures / "shards", root / "hf"
    )
    rows = []
    for workers in WORKERS:
        bare = BareProcesses(jpegs, workers)  # forked before the loaders start theirs
        ours = {p: Ours(path, assets, packing=p, workers=workers, options=options) for p in (False, True)}
        found: dict[bool, list[Round]] = {False: [], True: []}
        for _ in range(options.rounds):
            for packing, loader in ours.items():
                found[packing].append(
                    Round(
                        bare.run(options.seconds, pillow),
                        loader.run(options.seconds),
                        bare.run(options.seconds, torchvision),
                    )
                )
        for packing, loader in ours.items():
            loader.close()
            rows.append(_row(pictures, packing, workers, found[packing], loader.first_batch))
        bare.close()
    return rows


def _row(pictures: str, packing: bool, workers: int, rounds: list[Round], first_batch: float) -> Row:
    median = statistics.median
    return Row(
        pictures,
        packing,
        workers,
        bare_per_s=median(r.pillow.per_second for r in rounds),
        ours_per_s=median(r.ours.per_second for r in rounds),
        ratio=median(r.ours.per_second / r.pillow.per_second for r in rounds),
        cpu_ratio=median(r.pillow.cpu_per_sample / r.ours.cpu_per_sample for r in rounds),
        same_decoder_ratio=median(r.ours.per_second / r.torchvision.per_second for r in rounds),
        same_decoder_cpu_ratio=median(r.torchvision.cpu_per_sample / r.ours.cpu_per_sample for r in rounds),
        bare_cpu_ms=1000 * median(r.torchvision.cpu_per_sample for r in rounds),
        ours_cpu_ms=1000 * median(r.ours.cpu_per_sample for r in rounds),
        tokens_per_s=median(r.ours.tokens / r.ours.seconds for r in rounds),
        first_batch_s=first_batch,
    )


def show_speed(rows: Sequence[Row], console: Console) -> None:
    """Print the rows."""
    ratios = ("ratio", "CPU ratio", "same decoder", "its CPU ratio")
    columns = ("bare/s", "ours/s", *ratios, "CPU ms bare", "ours", "tokens/s", "first batch s")
    table = Table("pictures", "packed", "workers", *columns)
    for row in rows:
        parts = (row.ratio, row.cpu_ratio, row.same_decoder_ratio, row.same_decoder_cpu_ratio)
        numbers = (f"{row.bare_per_s:.0f}", f"{row.ours_per_s:.0f}", *(f"{part:.2f}" for part in parts))
        end = (
            f"{row.bare_cpu_ms:.2f}",
            f"{row.ours_cpu_ms:.2f}",
            f"{row.tokens_per_s:,.0f}",
            f"{row.first_batch_s:.2f}",
        )
        table.add_row(row.pictures, "yes" if row.packing else "no", str(row.workers), *numbers, *end)
    console.print(table)


def measure_fill(root: Path, assets: Assets, options: argparse.Namespace, console: Console) -> dict[str, float]:
    """Print and return the fill of both ways of packing; nine of ten samples have an image."""
    jpegs = make_pictures([(32, 32)], 8)
    samples = make_samples(options.num_samples, jpegs, text_only=0.1, median_tokens=options.median_tokens)
    path = write_shards(root / "fill", samples, num_shards=8)
    table = Table("seq length", "buffer", "ours %", "energon's own %")
    found: dict[str, float] = {}
    for seq_length in (2048, 4096):
        for buffer_size in (16, 64):
            both = [
                fill(path, assets, seq_length=seq_length, buffer_size=buffer_size, num_packs=400, energons=energons)
                for energons in (False, True)
            ]
            table.add_row(str(seq_length), str(buffer_size), *(f"{100 * part:.1f}" for part in both))
            for name, part in zip(("ours", "energon"), both, strict=True):
                found[f"{name}, {seq_length} tokens, buffer {buffer_size}"] = part
    console.print(table)
    return found


def measure_memory(root: Path, options: argparse.Namespace, console: Console) -> list[WorkerMemory]:
    """Print and return the loader processes' memory over many samples with tiny images."""
    assets = load_assets(make_hf_assets(root / "tiny-hf", image_size=28, seq_length=options.seq_length))
    samples = make_samples(20_000, make_pictures([(32, 32)], 64), text_only=0.1, median_tokens=15)
    path = write_shards(root / "tiny", samples, num_shards=8)
    found, rate = memory_over_samples(
        path, assets, samples=options.memory_samples, workers=2, seq_length=512, packing=options.pack_memory
    )
    table = Table("worker", "PSS first MiB", "last", "highest", "RSS last", "slope MiB/100k samples")
    for number, worker in enumerate(found):
        numbers = (worker.first_pss, worker.last_pss, worker.highest_pss, worker.last_rss, worker.slope)
        table.add_row(str(number), *(f"{value:.1f}" for value in numbers))
    console.print(table, f"{options.memory_samples:,} samples, {rate:,.0f}/s")
    return found


def main() -> None:
    """Measure what was asked for, print tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--only", choices=PARTS, action="append", help="measure only this; may be repeated")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    parser.add_argument("--pictures", choices=list(SIZES), nargs="+", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of one stretch of the bare loop or of the loader")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--micro-batch-size", type=int, default=4, help="where nothing is packed")
    parser.add_argument("--num-samples", type=int, default=4000)
    parser.add_argument("--num-pictures", type=int, default=256)
    parser.add_argument("--median-tokens", type=int, default=150, help="of the text of a sample")
    parser.add_argument("--memory-samples", type=int, default=20_000)
    parser.add_argument("--pack-memory", action="store_true", help="measure memory with packing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console, parts = Console(file=sys.stdout, width=150), options.only or PARTS
    result: dict[str, object] = {"cores": os.cpu_count(), "load": os.getloadavg()}
    console.print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the start")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        root = Path(folder)
        assets = load_assets(make_hf_assets(root / "hf", image_size=CROPPED, seq_length=options.seq_length))
        if "speed" in parts:
            rows = [row for pictures in options.pictures for row in measure_speed(root, assets, pictures, options)]
            show_speed(rows, console)
            result["speed"] = [asdict(row) for row in rows]
        if "fill" in parts:
            result["fill"] = measure_fill(root, assets, options, console)
        if "memory" in parts:
            result["memory"] = [asdict(worker) for worker in measure_memory(root, options, console)]
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
