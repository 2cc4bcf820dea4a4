"""Samples per CPU second of the loader beside other loaders, on the same shards, with the same decoder, in one run.

    python -m benchmarks.data_peers --workers 1 --json out.json

All decode and resize the same JPEGs with torchvision's decoder. Ours also reads tokens and masks, and collates
micro-batches as training takes them, with and without packing; the others parse a sample's json and stack the images
of four samples. Times are those of all processes. MosaicML streaming reads the same samples in its own format; it is
left out, and said, where `mosaicml-streaming` is not installed. Needs scikit-learn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import webdataset
from megatron.energon import Cooker, DefaultTaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset, stateless
from megatron.energon.task_encoder.cooking import basic_sample_keys
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.v2 import functional as F

from benchmarks.data import Ours, cpu_seconds
from benchmarks.data_bare import CROPPED, BareProcesses, Speed, torchvision
from benchmarks.data_material import make_hf_assets, make_pictures, make_samples, prepare_shards
from benchmarks.material import write_shards
from llava_mcore.data.encode.assets import load_assets

BATCH = 4
"""Samples of a micro-batch."""
SIZE = (640, 480)


def pixels(jpeg: bytes) -> Tensor:
    """Return an image as the bare loop makes it, uint8 [3, h, w]."""
    image = F.resize(torchvision(jpeg), [CROPPED], interpolation=F.InterpolationMode.BICUBIC, antialias=True)
    return F.center_crop(image, [CROPPED, CROPPED])


def decoded(sample: dict[str, Any]) -> tuple[Tensor, str]:
    """Return pixels and answer of a sample of a shard."""
    return pixels(sample["0.jpg"]), json.loads(sample["json"])["messages"][-1]["content"]


class TarSamples(Dataset[tuple[Tensor, str]]):
    """The samples of some shards by number: one read each, at offsets that are looked up once."""

    def __init__(self, shards: Sequence[Path]) -> None:
        self.places: list[dict[str, tuple[Path, int, int]]] = []
        for shard in shards:
            by_key: dict[str, dict[str, tuple[Path, int, int]]] = {}
            with tarfile.open(shard) as tar:
                for member in tar:
                    key, _, part = member.name.partition(".")
                    by_key.setdefault(key, {})[part] = (shard, member.offset_data, member.size)
            self.places += by_key.values()
        self._files: dict[Path, int] = {}

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        return decoded({part: self._read(*place) for part, place in self.places[index].items()})

    def _read(self, shard: Path, offset: int, size: int) -> bytes:
        if shard not in self._files:
            self._files[shard] = os.open(shard, os.O_RDONLY)
        return os.pread(self._files[shard], size, offset)


@stateless
def parts(sample: dict[str, Any]) -> dict[str, Any]:
    """Return what energon passes on of a sample of a shard."""
    return {**basic_sample_keys(sample), "0.jpg": sample["0.jpg"], "json": sample["json"]}


class Pictures(DefaultTaskEncoder):
    """energon's steps: cook, encode, stack."""

    cookers = (Cooker(parts),)
    decoder = None

    @stateless
    def encode_sample(self, sample: Any) -> Any:
        image, answer = decoded(sample)
        return {**basic_sample_keys(sample), "image": image, "answer": answer}

    def batch(self, samples: Sequence[Any]) -> Any:
        return torch.stack([sample["image"] for sample in samples]), [sample["answer"] for sample in samples]

    def encode_batch(self, batch: Any) -> Any:
        return batch


def torch_batches(shards: Sequence[Path], workers: int) -> Iterable[Any]:
    """Return torch's DataLoader with random access."""
    return DataLoader(TarSamples(shards), BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)


def webdataset_batches(shards: Sequence[Path], workers: int) -> Iterable[Any]:
    """Return webdataset's pipeline with its shuffle buffer."""
    data = webdataset.WebDataset([str(path) for path in shards], shardshuffle=100, empty_check=False)
    data = data.shuffle(1000).map(decoded)
    return DataLoader(data.batched(BATCH), batch_size=None, num_workers=workers, persistent_workers=workers > 0)


def energon_batches(shards: Sequence[Path], workers: int) -> Iterable[Any]:
    """Return energon's savable loader."""
    dataset = get_train_dataset(
        shards[0].parent,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=workers),
        batch_size=BATCH,
        shuffle_buffer_size=1000,
        max_samples_per_sequence=100,
        task_encoder=Pictures(),
    )
    return get_savable_loader(dataset)


def mosaic_batches(shards: Sequence[Path], workers: int) -> Iterable[Any]:
    """Return MosaicML's StreamingDataset over the same samples, written in its own format."""
    from streaming import MDSWriter, StreamingDataset

    class Streamed(StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            return decoded(super().__getitem__(index))

    folder = shards[0].parent.parent / "mosaic"
    if not folder.exists():
        source = TarSamples(shards)
        with MDSWriter(out=str(folder), columns={"0.jpg": "bytes", "json": "bytes"}) as writer:
            for places in source.places:
                writer.write({part: source._read(*place) for part, place in places.items()})
    data = Streamed(local=str(folder), shuffle=True, batch_size=BATCH)
    return DataLoader(data, BATCH, num_workers=workers, persistent_workers=workers > 0)


PEERS: dict[str, Callable[[Sequence[Path], int], Iterable[Any]]] = {
    "torch DataLoader": torch_batches,
    "webdataset": webdataset_batches,
    "energon": energon_batches,
    "MosaicML streaming": mosaic_batches,
}


class Peer:
    """Another loader, read again and again from its beginning."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = self._endless(batches)
        for _ in range(50):  # it fills its buffers
            next(self._batches)

    def _endless(self, batches: Iterable[Any]) -> Iterator[Any]:
        while True:
            yield from batches

    def run(self, seconds: float) -> Speed:
        """Take batches for so long."""
        begin, cpu, samples = time.perf_counter(), cpu_seconds(), 0
        while time.perf_counter() - begin < seconds:
            images, *_ = next(self._batches)
            samples += len(images)
        return Speed(samples, 0, time.perf_counter() - begin, cpu_seconds() - cpu)

    def close(self) -> None:
        self._batches.close()


def measure(root: Path, options: argparse.Namespace, console: Console) -> dict[str, float]:
    """Return the CPU milliseconds per sample of every loader: medians over rounds in which all take turns."""
    hf = make_hf_assets(root / "hf", image_size=CROPPED, seq_length=4096)
    jpegs = make_pictures([SIZE], 256)
    samples = make_samples(options.num_samples, jpegs, text_only=0, median_tokens=150)
    path = prepare_shards(write_shards(root / "source", samples, num_shards=8), root / "shards", hf)
    assets, shards = load_assets(hf), sorted(path.glob("*.tar"))
    ours = argparse.Namespace(seq_length=4096, micro_batch_size=BATCH)
    loaders: dict[str, Any] = {
        "ours": Ours(path, assets, packing=False, workers=options.workers, options=ours),
        "ours, packed": Ours(path, assets, packing=True, workers=options.workers, options=ours),
    }
    for name, opened in PEERS.items():
        try:
            loaders[name] = Peer(opened(shards, options.workers))
        except ImportError as error:
            console.print(f"{name} is left out: {error}")
    bare = BareProcesses(jpegs, 0)
    found: dict[str, list[float]] = {name: [] for name in ("bare loop", *loaders)}
    for _ in range(options.rounds):
        found["bare loop"].append(1000 * bare.run(options.seconds, torchvision).cpu_per_sample)
        for name, loader in loaders.items():
            found[name].append(1000 * loader.run(options.seconds).cpu_per_sample)
    for loader in loaders.values():
        loader.close()
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--workers", type=int, default=1, help="loader processes of each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a loader's turn in a round")
    parser.add_argument("--num-samples", type=int, default=4000)
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(file=sys.stdout, width=120)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        rows = measure(Path(folder), options, console)
    table = Table("loader", "CPU ms per sample", "bare loop ÷ loader")
    for name, value in rows.items():
        table.add_row(name, f"{value:.2f}", f"{rows['bare loop'] / value:.2f}")
    console.print(table, f"{options.workers} loader processes, load {os.getloadavg()[0]:.1f}")
    if options.json is not None:
        result = {"workers": options.workers, "cpu_ms_per_sample": rows, "load": os.getloadavg()}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
