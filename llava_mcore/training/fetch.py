"""Reading one step's micro-batches."""

from __future__ import annotations

from typing import Any, Protocol

from llava_mcore.batch_fields import Fields
from llava_mcore.errors import DataError, LlavaMcoreError, problems
from llava_mcore.parallel.batch import MicroBatch
from llava_mcore.parallel.groups import Groups, agree
from llava_mcore.parallel.share import share_step
from llava_mcore.training.batch_counts import Counts, LoadedBatch, count_all
from llava_mcore.training.faults.skipped_samples import SkipBudget


class Loader(Protocol):
    """The source of a rank's micro-batches."""

    def __next__(self) -> LoadedBatch: ...

    def state(self) -> Any: ...


class Remembering:
    """A loader that remembers the micro-batches since `last` was cleared."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self.last: list[LoadedBatch] = []

    def __next__(self) -> LoadedBatch:
        batch = next(self._loader)
        self.last.append(batch)
        return batch

    def state(self) -> Any:
        return self._loader.state()


def fetch_step(
    groups: Groups, loader: Loader | None, num_micro_batches: int, budget: SkipBudget, fields: Fields
) -> tuple[list[MicroBatch], Counts]:
    """Return the step's micro-batches and the counts of the global batch; a collective call.

    Raises:
        DataError: on all ranks, if any of them could not read its data.
    """
    batches: list[LoadedBatch] | None = None
    problem: str | None = None
    if loader is not None:
        try:
            batches = [next(loader) for _ in range(num_micro_batches)]
            budget.report(batches)
        except LlavaMcoreError as error:
            problem = str(error)
    found = agree(groups, problem)
    if found:
        raise DataError(problems("training data cannot be used", found), on_all_ranks=True)
    counts = count_all(groups, batches or [])
    return share_step(groups, batches, num_micro_batches, fields), counts
