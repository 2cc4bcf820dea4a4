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
from llava_mcore.data.storage.dataset_path import refuse_endless
from llava_mcore.data.storage.remote import locate
from llava_mcore.data.storage.shard_reader import read_shards_directly
from llava_mcore.data.storage.tar_files import OPEN_SHARDS
from llava_mcore.errors import DataError

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
    refuse_endless(path)
    refuse_named_code()
    OPEN_SHARDS.close_all()
    forget_read_members()
    skip_nested_lines()
    try:
        with contextlib.redirect_stdout(sys.stderr):  # energon prints a line for each .jsonl
            loaded = load_dataset(path if isinstance(path, Path) else locate(path)).get_datasets(
                training=False, split_part=split, worker_config=workers, decoder=encoder.decoder
            )
            return [_open(one, encoder, workers) for one in loaded.datasets]
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
