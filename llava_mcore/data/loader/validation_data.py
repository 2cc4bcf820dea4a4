"""The validation split, each sample once, divided so that every number of ranks reads the same samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Self

from torch.utils.data import IterableDataset

from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.loader.datasets import open_datasets
from llava_mcore.data.loader.open_streams import ListedSamples, open_reader, packing_of
from llava_mcore.data.loader.sample_problems import SampleWarnings, Skips
from llava_mcore.data.loader.source import BatchSource, Delivery, reading
from llava_mcore.data.loader.stream import Stream
from llava_mcore.data.loader.task_encoder import ChatTaskEncoder
from llava_mcore.data.loader.turns import share
from llava_mcore.data.samples import Batch
from llava_mcore.data.storage.dataset_path import VALIDATION, check_dataset
from llava_mcore.errors import DataError

MOST_STREAMS = 64
"""Number of streams, independent of the number of ranks; more ranks than that would have nothing to read."""
LEAST_SAMPLES = 8
"""Minimum samples of a stream, so that its packs are full."""


class ValidationData:
    """The validation split. Packs are built within a stream, so they are the same for every number of ranks."""

    def __init__(
        self,
        data: DataConfig,
        assets: Assets,
        *,
        micro_batch_size: int,
        seed: int,
        pad_multiple: int = 8,
        most_samples: int | None = None,
    ) -> None:
        """Open the data; no sample is read yet.

        Args:
            seed: chooses prompts if a dataset has a pool of them.
            pad_multiple: what the tokens of a micro-batch are padded to a multiple of.
            most_samples: maximum number of samples of one pass; None: all.

        Raises:
            DataError: the data is not prepared, or has no validation split.
        """
        check_dataset(data.path, VALIDATION)
        assert data.path is not None
        self._data, self._assets, self._seed, self._pad_multiple = data, assets, seed, pad_multiple
        self._micro_batch_size = micro_batch_size
        with reading(data.path, data.timeout):
            self._datasets = open_datasets(data.path, max_sample_bytes=data.max_sample_bytes, split=VALIDATION)
        # The samples of a pass, spread over all datasets.
        total = sum(dataset.num_samples for dataset in self._datasets)
        if not total:
            raise DataError(f"the validation part of {data.path} has no samples")
        self.num_samples = total if most_samples is None else min(total, most_samples)
        """Samples of one pass over all ranks, including broken ones."""
        self.parts = parts_of([(x.path, x.num_samples) for x in self._datasets], self.num_samples)
        """Which of these samples belong to each dataset, by its path."""
        self._warnings = SampleWarnings(data.path, assets)

    def open(self, dp_rank: int, dp_size: int, part: int) -> ValidationPass:
        """Start a pass over one of `parts`: the micro-batches of one data-parallel rank, always the same ones."""
        indices = list(self.parts.values())[part]
        num_streams = max(1, min(MOST_STREAMS, len(indices) // LEAST_SAMPLES))
        streams = range(dp_rank, min(num_streams, len(indices)), dp_size)
        open_one = partial(self._open_stream, indices, num_streams)
        return ValidationPass(self._data, open_one, streams, self._seed, self._warnings)

    def _open_stream(self, indices: range, num_streams: int, index: int) -> Stream:
        skips = Skips(stop_if_too_long=self._data.on_too_long == "error")
        encoder = ChatTaskEncoder(self._data, self._assets, skips, seed=self._seed, pad_multiple=self._pad_multiple)
        reader = open_reader(self._data, self._datasets, encoder, endless=False)
        order = ListedSamples(self._datasets, self.num_samples, indices[index::num_streams])
        return Stream(order, reader, batch_size=self._micro_batch_size, packing=packing_of(self._data))


def parts_of(datasets: Sequence[tuple[str, int]], num_chosen: int) -> dict[str, range]:
    """Return which of the chosen samples belong to each dataset; one without any is left out.

    Args:
        datasets: path and number of samples; one that is listed twice is two datasets.
        num_chosen: samples that are spread evenly over all of them: number i is sample i * total // num_chosen.
    """
    total, first = sum(size for _, size in datasets), 0
    parts: dict[str, range] = {}
    for path, size in datasets:
        start, stop = (-(-bound * num_chosen // total) for bound in (first, first + size))
        if start < stop:
            name = path if path not in parts else f"{path} ({sum(x.startswith(path) for x in parts) + 1})"
            parts[name] = range(start, stop)
        first += size
    return parts


class ValidationPass:
    """One rank's micro-batches of one pass; the last one of a stream may have fewer rows than the others."""

    def __init__(
        self,
        data: DataConfig,
        open_one: Callable[[int], Stream],
        indices: Sequence[int],
        seed: int,
        warnings: SampleWarnings,
    ) -> None:
        """indices: the streams of this rank."""
        assert data.path is not None
        self._warnings = warnings
        self._path, self._timeout = data.path, data.timeout
        in_process = data.num_workers == 0
        shares = share(indices, max(1, data.num_workers)) if indices else []
        self._sources = deque(
            BatchSource(_Server(open_one, part), in_process=in_process, seed=seed, timeout=data.timeout)
            for part in shares
        )

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the next micro-batch. DataError if the data cannot be read; the pass is closed then."""
        while self._sources:
            source = self._sources[0]
            try:
                with reading(self._path, self._timeout):
                    delivery = source.next()
            except StopIteration:
                source.close()
                self._sources.popleft()
            except DataError:
                self.close()
                raise
            else:
                self._sources.rotate(-1)
                self._warnings.look_at(delivery.batch)
                return delivery.batch
        raise StopIteration

    def close(self) -> None:
        """Stop the loader processes. A second call does nothing."""
        while self._sources:
            self._sources.popleft().close()


class _Server(IterableDataset[Delivery]):
    """The streams that one loader process reads, one after the other."""

    def __init__(self, open_one: Callable[[int], Stream], indices: Sequence[int]) -> None:
        self._open_one, self._indices = open_one, list(indices)

    def __iter__(self) -> Iterator[Delivery]:
        for index in self._indices:
            stream = self._open_one(index)
            batch = next(stream, None)
            while batch is not None:
                following = next(stream, None)
                if following is None:
                    batch.skipped += stream.take_skips()  # what was skipped after the last sample
                yield Delivery(index, batch, None)
                batch = following
