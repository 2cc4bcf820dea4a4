"""The datasets of a data path, opened as in training, with access to every sample by its number."""

from __future__ import annotations

import contextlib
import functools
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import ryml
from megatron.energon import CrudeSample, WorkerConfig, load_dataset
from megatron.energon.flavors.webdataset.base_webdataset import BaseWebdatasetFactory
from megatron.energon.flavors.webdataset.empty_dataset_error import EmptyDatasetError
from megatron.energon.flavors.webdataset.sample_loader import RawSampleData, WebdatasetSampleLoaderDataset
from megatron.energon.metadataset.loader_interface import LoadedDataset
from megatron.energon.wrappers.map_dataset import MapDataset

from llava_mcore.compat.energon.named_code import NamedCodeError, refuse_named_code
from llava_mcore.compat.energon.shards import forget_read_members
from llava_mcore.data.encode.conversation import TextDecoder, chat_from_standard, cook_chat
from llava_mcore.data.encode.prompts import POOL_KEY
from llava_mcore.data.samples import ChatSample
from llava_mcore.data.storage.blend import SPLIT
from llava_mcore.data.storage.dataset_path import MANIFEST, refuse_endless
from llava_mcore.data.storage.remote import locate
from llava_mcore.data.storage.shard_reader import ShardReader, read_shards_directly
from llava_mcore.data.storage.stored_tokens import StoredTokens
from llava_mcore.data.storage.tar_files import OPEN_SHARDS
from llava_mcore.errors import DataError
from llava_mcore.files.regular import read_object

DECODER = TextDecoder()

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


MAX_EPOCHS = "max_epochs"
"""Our own key of a dataset in a blend: passes after which it is left out."""
NO_EPOCHS = "give training.epoch_samples=N, or the length of the run with --train-iters or --train-samples"


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
    weight: float
    """Its samples among those of all datasets of the path; the weights need not add up to 1."""
    subflavors: Mapping[str, Any]
    """Our own keys that the blend has for it."""
    source: MapDataset[Any, Any]
    cook: Callable[[Any], Any]
    """Converts a raw sample, as training does before tokenizing."""
    token_reader: ShardReader | None = None
    """Reads the tokens beside its shards; None if its samples may have other tokens in this run."""
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

    def raw(self, index: int) -> RawSampleData | None:
        """Return the parts of a sample as they are in its shard; None if split.yaml excludes it.

        Args:
            index: number of the sample in the dataset; a part of a dataset in a blend begins at shards[0].first.

        Raises:
            DATA_ERRORS, DataError: the sample is damaged, or its shard cannot be read.
        """
        parts = self.source.dataset._get_sample(index)
        return None if any(part is None for part in parts.data) else parts

    def stored(self, index: int, fingerprint: str) -> StoredTokens | None:
        """Return the tokens that `prepare` stored beside the shard, for a sample that was read; None if there are none.

        Args:
            fingerprint: that of the tokenizer and chat template they must have been made with.
        """
        return None if self.token_reader is None else self.token_reader.stored(index, fingerprint)

    def decode(self, parts: RawSampleData) -> Any:
        """Return a sample of energon's types, with its texts decoded; DATA_ERRORS or DataError if it is broken."""
        try:
            return self.source.map_fn(parts)
        except RecursionError as error:
            raise DataError(f"its json is nested too deeply: {error}") from error

    def chat(self, decoded: Any) -> ChatSample:
        """Return the conversations of a decoded sample, with media still encoded. Errors as of `decode`."""
        return chat_from_standard(self.cook(decoded))


def open_datasets(path: Path | str, *, max_sample_bytes: int, split: str = SPLIT) -> list[Dataset]:
    """Open every dataset of a prepared folder or a blend.

    Args:
        max_sample_bytes: a larger sample is not read.
        split: the part of the data.

    Raises:
        DataError: energon cannot open them.
    """
    OPEN_SHARDS.close_all()
    forget_read_members()
    with _opening(path):
        return [_open(one, max_sample_bytes) for one in _listed(path, split)]


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the last part of each path, or the full paths if these would not differ; a number follows a path that is
    listed again."""
    names = [PurePosixPath(path).name for path in paths]
    if len(set(names)) < len(names):
        names = [x if paths.index(x) == n else f"{x} ({paths[: n + 1].count(x)})" for n, x in enumerate(paths)]
    return names


def samples_per_epoch(path: Path | str) -> int:
    """Return the number of samples, and of prepared packs of the samples in them, in one pass through a data path.

    Raises:
        DataError: energon cannot open it; or it has no passes, or they cannot be counted without reading everything.
    """
    with _opening(path):
        datasets = _listed(path, SPLIT)
        if any(one.weight is not None for one in datasets):
            raise DataError(f"{path} is a blend by weights, which has no epochs: {NO_EPOCHS}")
        limited = [str(one.dataset.path) for one in datasets if MAX_EPOCHS in (one.dataset.subflavors or {})]
        if limited:
            raise DataError(
                f"{path} has no epochs of one length: {MAX_EPOCHS} leaves {', '.join(limited)} out after some. Remove "
                f"{MAX_EPOCHS}, or {NO_EPOCHS}"
            )
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


def _listed(path: Path | str, split: str) -> list[LoadedDataset]:
    """Return the datasets of a data path as energon finds them, not yet opened."""
    refuse_endless(path)
    refuse_named_code()
    workers = WorkerConfig(rank=0, world_size=1, num_workers=0)
    location = path if isinstance(path, Path) else locate(path)
    loaded = load_dataset(location).get_datasets(
        training=False, split_part=split, worker_config=workers, decoder=DECODER
    )
    return list(loaded.datasets)


@contextlib.contextmanager
def _opening(path: Path | str) -> Iterator[None]:
    """Turn energon's errors into DataErrors."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # energon prints a line for each .jsonl
            yield
    except NamedCodeError as error:
        raise DataError(f"{path} is refused, see its .nv-meta/dataset.yaml: {error}") from error
    except OPEN_ERRORS as error:
        raise DataError(f"{path} cannot be opened, see its .nv-meta/dataset.yaml: {error!r}") from error


def _open(loaded: LoadedDataset, max_sample_bytes: int) -> Dataset:
    factory = loaded.dataset
    cook: Callable[[Any], Any] = _as_it_is
    subflavors = factory.subflavors or {}
    if factory.__sample_type__ is CrudeSample:
        unknown = sorted((loaded.aux or {}).keys() - {"images"})
        if unknown:
            raise DataError(f"{factory.path}: aux has {', '.join(unknown)}, but only images is read")
        cook = functools.partial(cook_chat, **(loaded.aux or {}))
    source = factory.build()
    read_shards_directly(source, max_sample_bytes)
    weight, repetitions = loaded.weight, loaded.repetitions
    shards = _shards(factory)
    num_samples = sum(shard.count for shard in shards)
    return Dataset(
        path=str(factory.path),
        shards=shards,
        share=f"{weight:.1%}" if weight is not None else f"x {repetitions:g}" if repetitions is not None else "",
        repeats=None if weight is not None else float(repetitions or 1),
        weight=float(weight) if weight is not None else (1 if repetitions is None else repetitions) * num_samples,
        subflavors=subflavors,
        source=source,
        cook=cook,
        token_reader=_token_reader(source, factory, loaded),
    )


def _token_reader(source: MapDataset[Any, Any], factory: Any, loaded: LoadedDataset) -> ShardReader | None:
    """Return the reader of tokens stored beside shards; None if questions or images come from elsewhere."""
    if factory.__sample_type__ is not CrudeSample or loaded.aux or POOL_KEY in (factory.subflavors or {}):
        return None
    readers = source.dataset.join_readers if isinstance(source.dataset, WebdatasetSampleLoaderDataset) else []
    return readers[0] if len(readers) == 1 and isinstance(readers[0], ShardReader) else None


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


def _as_it_is(sample: Any) -> Any:
    return sample
