"""Reads every sample of some data paths, in several processes, and returns their signatures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from llava_mcore.config.sections.data import LIMITS
from llava_mcore.data.loader.datasets import Dataset, open_datasets
from llava_mcore.data.loader.loader_process import loader_process_init
from llava_mcore.data.loader.sample_problems import DATA_ERRORS, reason_of
from llava_mcore.data.samples import ChatSample
from llava_mcore.data.storage.dataset_path import check_dataset
from llava_mcore.dedup.signature import SamplePlace, Signature, signature_of
from llava_mcore.errors import DataError

CHUNK = 64
"""Samples that a process reads at a time."""


class Library:
    """All datasets of some data paths, with a number for each."""

    def __init__(self, paths: Sequence[Path | str], split: str) -> None:
        """Open the datasets. DataError if one is not prepared, or does not have this part."""
        self.datasets: list[Dataset] = []
        for path in paths:
            check_dataset(path, split)
            self.datasets += open_datasets(path, max_sample_bytes=LIMITS.sample_bytes, split=split)

    def read(self, place: SamplePlace) -> ChatSample:
        """Return a sample. DATA_ERRORS or DataError if it is broken."""
        dataset = self.datasets[place.dataset]
        parts = dataset.raw(place.index)
        if parts is None:
            raise DataError("split.yaml excludes it")
        return dataset.chat(dataset.decode(parts))

    @property
    def num_samples(self) -> int:
        """Samples of all datasets."""
        return sum(dataset.num_samples for dataset in self.datasets)


@dataclass
class ScanResult:
    """Signatures of the samples that were read, and counts of the others."""

    signatures: list[Signature] = field(default_factory=list)
    excluded: int = 0
    """Samples that split.yaml excludes already."""
    broken: Counter[str] = field(default_factory=Counter)
    """Samples that cannot be read, by reason."""


def scan(library: Library, *, num_workers: int, on_samples: Callable[[int], None]) -> ScanResult:
    """Return the signatures of all samples in their order.

    Args:
        on_samples: called with the number of samples read since the last call.

    Raises:
        DataError: a process was killed.
    """
    loader = DataLoader(
        _Chunks(library),
        batch_size=None,
        num_workers=num_workers,
        collate_fn=_unchanged,
        multiprocessing_context="fork" if num_workers else None,
        worker_init_fn=loader_process_init(),
    )
    # Results come in the order of the samples, whichever process has read them.
    result = ScanResult()
    try:
        for chunk in loader:
            for one in chunk:
                if isinstance(one, Signature):
                    result.signatures.append(one)
                elif one is None:
                    result.excluded += 1
                else:
                    result.broken[one] += 1
            on_samples(len(chunk))
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise DataError(f"a process was killed ({error}); if memory ran out, lower --num-workers") from error
    return result


class _Chunks(TorchDataset[list["Signature | str | None"]]):
    """Chunks of samples: a signature, None for an excluded sample, or why it cannot be read."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.chunks = [
            (dataset_index, range(dataset.shards[0].first + first, dataset.shards[0].first + min(first + CHUNK, count)))
            for dataset_index, dataset in enumerate(library.datasets)
            for count in [dataset.num_samples]
            for first in range(0, count, CHUNK)
        ]

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, index: int) -> list[Signature | str | None]:
        dataset_index, indices = self.chunks[index]
        return [self._signature(dataset_index, n) for n in indices]

    def _signature(self, dataset_index: int, index: int) -> Signature | str | None:
        dataset = self.library.datasets[dataset_index]
        parts = dataset.raw(index)
        if parts is None:
            return None
        place = SamplePlace(dataset_index, index, dataset.shard_of(index).name, str(parts.data[0]["__key__"]))
        try:
            return signature_of(place, dataset.chat(dataset.decode(parts)))
        except (*DATA_ERRORS, DataError) as error:
            return reason_of(error)


def _unchanged(chunk: list[Signature | str | None]) -> list[Signature | str | None]:
    return chunk
