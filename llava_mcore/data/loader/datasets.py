"""The datasets of a data path, opened as in training, with access to every sample by its number."""

from __future__ import annotations

import contextlib
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ryml
from megatron.energon import Cooker, CrudeSample, SavableDataset, SourceInfo, WorkerConfig, load_dataset
from megatron.energon.cache import NoCachePool
from megatron.energon.flavors.webdataset.base_webdataset import BaseWebdatasetFactory
from megatron.energon.flavors.webdataset.empty_dataset_error import EmptyDatasetError
from megatron.energon.metadataset.loader_interface import LoadedDataset

from llava_mcore.compat.energon.jsonl import skip_nested_lines
from llava_mcore.compat.energon.memory import forget_read_members
from llava_mcore.compat.energon.named_code import NamedCodeError, refuse_named_code
from llava_mcore.data.loader.task_encoder import ChatTaskEncoder
from llava_mcore.data.storage.blend import SPLIT
from llava_mcore.data.storage.dataset_path import MANIFEST, refuse_endless
from llava_mcore.data.storage.remote import locate
from llava_mcore.data.storage.shard_reader import read_shards_directly
from llava_mcore.data.storage.tar_files import OPEN_SHARDS
from llava_mcore.errors import DataError
from llava_mcore.files.regular import read_object

ErrorHandler = Callable[[Exception, Any, list[SourceInfo] | None], None]

OPEN_ERRORS = (
    AssertionError,
    AttributeError,
    EmptyDatasetError,
    ImportError,
    KeyError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
    ryml.ExceptionBasic,
)
"""Errors that energon raises for an invalid dataset.yaml, split.yaml or blend."""


NO_EPOCHS = "give training.epoch_samples=N, or --train-iters or --train-samples in place of --train-epochs"


@dataclass(frozen=True)
class DatasetShard:
    """The samples of one shard that belong to the data: numbers first to first + count - 1 of their dataset."""

    name: str
    first: int
    count: int


@dataclass(frozen=True)
class Dataset:
    """One dataset of a data path."""

    path: str
    shards: tuple[DatasetShard, ...]
    share: str
    """Its weight in a blend, or repetitions per epoch; empty if the blend does not say."""
    repeats: float | None
    """Repetitions of its samples in an epoch of the blend; None if the blend draws by weight and has no epochs."""
    source: SavableDataset[Any]
    cook: Callable[[Any], Any]
    """Converts a raw sample, as training does before tokenizing."""
    workers: WorkerConfig
    firsts: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "firsts", tuple(shard.first for shard in self.shards))

    @property
    def num_samples(self) -> int:
        """Samples of all its shards."""
        return sum(shard.count for shard in self.shards)

    def shard_of(self, index: int) -> DatasetShard:
        """Return the shard of a sample."""
        return self.shards[bisect_right(self.firsts, index) - 1]

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Context in which energon's steps can run, which need a loader process."""
        self.workers.worker_activate(0, cache_pool=NoCachePool())
        try:
            yield
        finally:
            self.workers.worker_deactivate()

    def read(self, index: int) -> Any:
        """Read one sample and decode its parts; errors of decoding go to the error handler."""
        return self.source.restore_sample((type(self.source).__name__, 0, "Webdataset", index))


def open_datasets(
    path: Path | str, encoder: ChatTaskEncoder, on_error: ErrorHandler, *, split: str = SPLIT
) -> list[Dataset]:
    """Open every dataset of a prepared folder or a blend.

    Args:
        split: the part of the data.
        on_error: called with errors of decoding a sample's parts; must raise.

    Raises:
        DataError: energon cannot open them.
    """
    workers = WorkerConfig(rank=0, world_size=1, num_workers=0, restore_error_handler=on_error)
    OPEN_SHARDS.close_all()
    forget_read_members()
    with _opening(path):
        return [_open(one, encoder, workers) for one in _listed(path, split, workers, decoder=encoder.decoder)]


def samples_per_epoch(path: Path | str) -> int:
    """Return the number of samples, and of prepared packs of the samples in them, in one pass through a data path.

    Raises:
        DataError: energon cannot open it; or it has no passes, or they cannot be counted without reading everything.
    """
    with _opening(path):
        datasets = _listed(path, SPLIT, WorkerConfig(rank=0, world_size=1, num_workers=0))
        if any(one.weight is not None for one in datasets):
            raise DataError(f"{path} is a blend by weights, which has no epochs: {NO_EPOCHS}")
        return round(sum(_count(one.dataset) * float(one.repetitions or 1) for one in datasets))


def _count(factory: Any) -> int:
    """Return the number of conversations of a dataset, in the subset that a blend takes of it."""
    shards = _shards(factory)
    file = Path(str(factory.path)) / MANIFEST
    manifest = read_object(file, DataError) if file.is_file() else {}
    totals = manifest.get("totals", {})
    if totals.get("entries") == totals.get("conversations"):
        return sum(shard.count for shard in shards)
    entries = {shard["name"]: shard["samples"] for shard in manifest["shards"]}
    conversations = {shard["name"]: shard.get("conversations") for shard in manifest["shards"]}
    if any(conversations.get(shard.name) is None or shard.count != entries[shard.name] for shard in shards):
        raise DataError(f"{file} does not say how many conversations are in the packs of each shard: {NO_EPOCHS}")
    return sum(conversations[shard.name] for shard in shards)


def _listed(path: Path | str, split: str, workers: WorkerConfig, **options: Any) -> list[LoadedDataset]:
    """Return the datasets of a data path as energon finds them, not yet opened."""
    refuse_endless(path)
    refuse_named_code()
    skip_nested_lines()
    location = path if isinstance(path, Path) else locate(path)
    loaded = load_dataset(location).get_datasets(training=False, split_part=split, worker_config=workers, **options)
    return list(loaded.datasets)


@contextlib.contextmanager
def _opening(path: Path | str) -> Iterator[None]:
    """Raise DataError for what energon raises."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # energon prints a line for each .jsonl
            yield
    except NamedCodeError as error:
        raise DataError(f"{path} is refused, see its .nv-meta/dataset.yaml: {error}") from error
    except OPEN_ERRORS as error:
        raise DataError(f"{path} cannot be opened, see its .nv-meta/dataset.yaml: {error!r}") from error


def _open(loaded: LoadedDataset, encoder: ChatTaskEncoder, workers: WorkerConfig) -> Dataset:
    factory = loaded.dataset
    cook: Callable[[Any], Any] = _as_it_is
    if factory.__sample_type__ is CrudeSample:
        cook = _Cook(encoder, _cooker(encoder, factory.subflavors or {}), loaded.aux or {})
    source = factory.build()
    read_shards_directly(source, encoder.data.max_sample_bytes)
    weight, repetitions = loaded.weight, loaded.repetitions
    return Dataset(
        path=str(factory.path),
        shards=_shards(factory),
        share=f"{weight:.1%}" if weight is not None else f"x {repetitions:g}" if repetitions is not None else "",
        repeats=None if weight is not None else float(repetitions or 1),
        source=source,
        cook=cook,
        workers=workers,
    )


def _shards(factory: Any) -> tuple[DatasetShard, ...]:
    """Return the shards of a dataset, limited to the subset in a blend."""
    webdataset = isinstance(factory, BaseWebdatasetFactory)
    counts = [(s.name, s.count) for s in factory.shards] if webdataset else [(factory.path.name, len(factory))]
    start, end = 0, sum(count for _, count in counts)
    if factory.subset is not None:
        start, end = factory.subset.compute_subset(end)
    shards, index = [], 0
    for name, count in counts:
        first, last = max(index, start), min(index + count, end)
        if first < last:
            shards.append(DatasetShard(name, first, last - first))
        index += count
    return tuple(shards)


def _cooker(encoder: ChatTaskEncoder, subflavors: dict[str, Any]) -> Cooker[Any]:
    for cooker in encoder.cookers:
        if cooker.is_match(subflavors):
            return cooker
    raise DataError(f"no way to read samples with the subflavors {subflavors}")


def _as_it_is(sample: Any) -> Any:
    return sample


@dataclass(frozen=True)
class _Cook:
    encoder: ChatTaskEncoder
    cooker: Cooker[Any]
    aux: dict[str, Any]

    def __call__(self, sample: Any) -> Any:
        return self.encoder.cook_crude_sample(sample, cooker=self.cooker, aux=self.aux)
