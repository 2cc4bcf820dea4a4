"""Opens the data of a run: its datasets once, and streams that read them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from llava_mcore.config.rules.batch_size import BatchSizes
from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.encode.augment import Augmentation
from llava_mcore.data.loader.blend_shares import shares_of
from llava_mcore.data.loader.datasets import Dataset, open_datasets, short_names
from llava_mcore.data.loader.sample_problems import Skips
from llava_mcore.data.loader.sample_reader import MOST_IN_A_ROW, SampleReader
from llava_mcore.data.loader.stream import Packing, Stream
from llava_mcore.data.loader.task_encoder import ChatTaskEncoder
from llava_mcore.data.loader.turns import default_num_streams, streams_of_rank
from llava_mcore.data.order.stream_order import ChosenSample, Mixture, Progress, StreamOrder


@dataclass(frozen=True)
class RankReads:
    """The reading of one data-parallel rank: its part of the data, and its batches."""

    dp_rank: int
    dp_size: int
    micro_batch_size: int
    num_micro_batches: int
    """Micro-batches of this rank per step."""
    batch_sizes: BatchSizes
    """Global batch sizes over the run."""
    seed: int
    pad_multiple: int
    """The number of tokens of a micro-batch is padded to a multiple of this."""


class OpenedData(NamedTuple):
    """The data of a run, opened on one rank."""

    dataset_names: list[str]
    """Names of a blend's datasets, for the log; empty for a single dataset."""
    num_streams: int
    """Streams that the data is divided into, over all ranks."""
    streams: dict[int, Stream]
    """This rank's streams, at the beginning."""
    unread: list[str]
    """Paths of datasets whose weight in the blend is 0."""


def open_training(
    data: DataConfig,
    assets: Assets,
    rank: RankReads,
    augmentation: Augmentation | None,
    *,
    num_streams: int | None,
) -> OpenedData:
    """Open the datasets of a run and a rank's streams of them; no sample is read yet.

    Args:
        num_streams: from a saved position or `data.num_streams`; None for the default, which depends on the number of
            samples.

    Raises:
        DataError: the data cannot be opened, or a weight of the blend is not valid.
    """
    assert data.path is not None
    datasets = open_datasets(data.path, max_sample_bytes=data.max_sample_bytes)
    num_streams = num_streams or default_num_streams(sum(x.num_samples for x in datasets))
    of_blend = len(datasets) > 1

    # The reader encodes samples for all streams of this rank.
    mixture = mixture_of(datasets, data, num_streams=num_streams, seed=rank.seed)
    encoder = ChatTaskEncoder(
        data,
        assets,
        Skips(stop_if_too_long=data.on_too_long == "error"),
        seed=rank.seed,
        pad_multiple=rank.pad_multiple,
        augmentation=augmentation,
        of_blend=of_blend,
    )
    streams = open_streams(
        streams_of_rank(num_streams, rank.dp_rank, rank.dp_size),
        mixture,
        data,
        open_reader(data, datasets, encoder),
        batch_size=rank.micro_batch_size,
        global_batch_sizes=rank.batch_sizes,
    )
    names = short_names([x.path for x in datasets]) if of_blend else []
    return OpenedData(names, num_streams, streams, [x.path for x in datasets if not x.weight])


def mixture_of(datasets: Sequence[Dataset], data: DataConfig, *, num_streams: int, seed: int) -> Mixture:
    """Return how the datasets are mixed. DataError if a weight is not valid, or a dataset has no samples."""
    shares = shares_of(datasets, data.blend_weights)
    return Mixture.of(shares, window=data.shuffle_buffer_size, num_streams=num_streams, seed=seed)


def kept_bytes(data: DataConfig) -> int:
    """Return how many bytes of waiting samples each process may keep: its part of the limit of its node."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) * max(1, data.num_workers)
    return data.max_waiting_bytes // processes


def limit_line(data: DataConfig) -> str | None:
    """Return a line for the start of a run about memory of samples that wait for their pack; None without packing."""
    if not data.packing:
        return None
    return (
        f"samples that wait for their pack take at most {_said(data.max_waiting_bytes)} of a node's memory "
        f"(data.max_waiting_bytes), {_said(kept_bytes(data))} in each process that reads; others are read again"
    )


def _said(num_bytes: int) -> str:
    """Return a size as text, in its largest unit."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes} bytes"


def open_reader(
    data: DataConfig, datasets: Sequence[Dataset], encoder: ChatTaskEncoder, *, endless: bool = True
) -> SampleReader:
    """Return a reader of samples.

    Args:
        endless: end with an error after too many unusable samples in a row. Otherwise the data ends anyway, and the
            caller decides how many may be skipped.
    """
    return SampleReader(
        datasets,
        encoder,
        name=str(data.path),
        max_kept_bytes=kept_bytes(data),
        most_in_a_row=MOST_IN_A_ROW if endless else None,
    )


def open_streams(
    indices: Iterable[int],
    mixture: Mixture,
    data: DataConfig,
    reader: SampleReader,
    *,
    batch_size: int,
    global_batch_sizes: BatchSizes,
) -> dict[int, Stream]:
    """Return some of the streams of endless data, by their numbers.

    Args:
        batch_size: rows of a micro-batch.
        global_batch_sizes: over the run, for weights that change over iterations.
    """
    streams = mixture.num_streams
    common: dict[str, Any] = {"batch_size": batch_size, "packing": packing_of(data), "num_streams": streams}

    def rows_before(stream: int, num_batches: int) -> int:
        """Return the rows of all streams before a batch of one: they take turns."""
        return (num_batches * streams + stream) * batch_size

    def iterations_after(stream: int, num_batches: int) -> float:
        before, after = (rows_before(stream, n) for n in (num_batches, num_batches + 1))
        return global_batch_sizes.iterations_between(before, after)

    return {
        n: Stream(
            StreamOrder(mixture, n),
            reader,
            first_iteration=global_batch_sizes.iterations_between(0, rows_before(n, 0)),
            iterations_after=partial(iterations_after, n),
            **common,
        )
        for n in indices
    }


def packing_of(data: DataConfig) -> Packing | None:
    """Return how a stream packs; None without packing."""
    if not data.packing:
        return None
    return Packing(data.packing_buffer_size, data.seq_length, data.max_media_tokens, data.sample_multiple or 1)


class ListedSamples:
    """Some samples, each once."""

    def __init__(self, datasets: Sequence[Dataset], num_chosen: int, indices: range) -> None:
        """Start at the beginning.

        Args:
            num_chosen: samples that are spread evenly over all samples of all datasets.
            indices: which of those.
        """
        self._sizes = [dataset.num_samples for dataset in datasets]
        self._total = sum(self._sizes)
        self._indices = iter(indices)
        self._num_chosen = num_chosen

    def next(self, progress: Progress) -> ChosenSample | None:
        """Return the next sample; None at the end."""
        chosen = next(self._indices, None)
        if chosen is None:
            return None
        index = chosen * self._total // self._num_chosen
        for dataset, size in enumerate(self._sizes):
            if index < size:
                return ChosenSample(dataset, 0, index)
            index -= size
        raise AssertionError("an index within the total is in one of the datasets")

    def position(self) -> None:
        """Validation always starts at the beginning."""

    def restore(self, position: None) -> None:
        """Do nothing: see `position`."""
