"""Chooses the samples to check, and checks them in several processes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

from megatron.energon.flavors.webdataset.config import INDEX_SQLITE_FILENAME
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from llava_mcore.check_data.examiner import Examiner
from llava_mcore.check_data.finding import Finding
from llava_mcore.data.loader.datasets import Dataset
from llava_mcore.data.loader.loader_process import loader_process_init
from llava_mcore.data.storage.dataset_path import META
from llava_mcore.data.storage.shard_files import known_shards
from llava_mcore.errors import DataError

LEAST_SAMPLES = 256
"""Minimum number of samples: with few shards, several samples of each are checked."""
CHUNK = 32
GOLDEN = 0.618034
"""Its multiples modulo 1 are spread evenly, whatever their number."""

Task = tuple[int, tuple[int, ...]]
"""A dataset and the numbers of samples of one of its shards."""


def choose(datasets: Sequence[Dataset], *, full: bool) -> list[Task]:
    """Choose all samples, or one of every shard and at least 256 in all. The same data gives the same choice."""
    num_shards = sum(len(data.shards) for data in datasets)
    each = max(1, -(-LEAST_SAMPLES // max(1, num_shards)))
    tasks: list[Task] = []
    drawn = count(1)
    for index, data in enumerate(datasets):
        for shard in data.shards:
            if full or each >= shard.count:
                indices: Sequence[int] = range(shard.count)
            elif each == 1:
                indices = [int(shard.count * (next(drawn) * GOLDEN % 1))]
            else:  # from the first to the last
                indices = [i * (shard.count - 1) // (each - 1) for i in range(each)]
            chosen = [shard.first + index for index in indices]
            tasks += [(index, tuple(chosen[i : i + CHUNK])) for i in range(0, len(chosen), CHUNK)]
    return tasks


def find(datasets: Sequence[Dataset], key: str) -> tuple[int, int]:
    """Return the dataset and the number of the first sample with a key, which may have its shard's name in front:
    "000003.tar/000000017".

    Raises:
        DataError: no prepared folder on this machine has it in the part that is trained on.
    """
    for index, data in enumerate(datasets):
        file = Path(data.path) / META / INDEX_SQLITE_FILENAME
        if not file.is_file():
            continue
        with closing(sqlite3.connect(f"file:{quote(str(file))}?mode=ro&immutable=1", uri=True)) as db:
            shard, _, name = key.rpartition("/")
            query = "SELECT tar_file_id, sample_index FROM samples WHERE sample_key IN (?, ?)"
            rows = db.execute(query, (key, name)).fetchall()
        names = list(known_shards(Path(data.path)))
        for shard_index, sample in rows:
            for part in data.shards:
                if part.name == names[shard_index] and shard in ("", part.name) and sample < part.count:
                    return index, part.first + sample
    paths = ", ".join(data.path for data in datasets)
    raise DataError(f"no sample {key} in the train part of {paths}; keys are the names of files without their endings")


def scan(examiner: Examiner, tasks: Sequence[Task], *, num_workers: int, on_finding: Callable[[Finding], Any]) -> None:
    """Examine the samples of all tasks in their order, in this process or in num_workers others.

    Raises:
        DataError: a process was killed.
    """
    loader = DataLoader(
        _Tasks(examiner, tasks),
        batch_size=None,
        num_workers=num_workers,
        collate_fn=_unchanged,
        multiprocessing_context="fork" if num_workers else None,
        worker_init_fn=loader_process_init(),
    )
    try:
        for findings in loader:
            for finding in findings:
                on_finding(finding)
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise DataError(f"a process was killed ({error}); if memory ran out, lower --num-workers") from error


class _Tasks(TorchDataset[list[Finding]]):
    def __init__(self, examiner: Examiner, tasks: Sequence[Task]) -> None:
        self.examiner = examiner
        self.tasks = tasks

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: int) -> list[Finding]:
        dataset, indices = self.tasks[index]
        return [self.examiner.examine(dataset, index) for index in indices]


def _unchanged(findings: list[Finding]) -> list[Finding]:
    return findings
