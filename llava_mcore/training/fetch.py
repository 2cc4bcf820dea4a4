"""Reading one step's micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from llava_mcore.errors import DataError, LlavaMcoreError, problems
from llava_mcore.media.batch_fields import Fields
from llava_mcore.parallel.groups import Groups, agree
from llava_mcore.parallel.share import SharedStep, share_step
from llava_mcore.training.batch_counts import LoadedBatch, StepCounts, count_all
from llava_mcore.training.faults.skipped_samples import SkipBudget


class MicroBatchLoader(Protocol):
    """The source of a rank's micro-batches."""

    def __next__(self) -> LoadedBatch: ...

    def state(self) -> Any: ...

    def read_again(self, state: Any, count: int) -> Sequence[LoadedBatch]:
        """Return the micro-batches that followed an earlier state."""
        ...


@dataclass(frozen=True)
class ReadStep:
    """Keys of the samples that a rank has read for one step. Micro-batches would take host memory until the loss is
    known; they are read again when that is not finite.

    sample_keys: of each micro-batch. before: the loader's state before them.
    """

    loader: MicroBatchLoader
    sample_keys: list[list[str]]
    before: Any

    def again(self) -> Sequence[LoadedBatch]:
        """Read the micro-batches again. DataError if the data cannot be read any more."""
        return self.loader.read_again(self.before, len(self.sample_keys))


class RecordingLoader:
    """A loader that remembers the position before a step, and the samples of the step."""

    def __init__(self, loader: MicroBatchLoader) -> None:
        self._loader = loader
        self._keys: list[list[str]] = []
        self.before: Any = None

    def begin(self) -> None:
        """Begin a step: forget the previous one."""
        self.before = self._loader.state()
        self._keys = []

    def step(self) -> ReadStep:
        """Return what has been read since the step began."""
        return ReadStep(self._loader, self._keys, self.before)

    def __next__(self) -> LoadedBatch:
        batch = next(self._loader)
        self._keys.append(list(batch.sample_keys))
        return batch

    def read_again(self, state: Any, count: int) -> Sequence[LoadedBatch]:
        return self._loader.read_again(state, count)

    def state(self) -> Any:
        return self._loader.state()


class Fetched(NamedTuple):
    """The micro-batches of one step, counts and named sums of the global batch, and which flags are set on any rank."""

    batches: SharedStep
    counts: StepCounts
    sums: Mapping[str, tuple[int, int]]
    flags: tuple[bool, ...]


def fetch_step(
    groups: Groups,
    loader: MicroBatchLoader | None,
    num_micro_batches: int,
    budget: SkipBudget,
    fields: Fields,
    flags: Sequence[bool] = (),
) -> Fetched:
    """Read one step's micro-batches; collective. In a step without validation or save, the only host-side one.

    Args:
        flags: what else the ranks have to agree on; as many on every rank.

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
    counts, sums, (failed, *set_flags) = count_all(groups, batches or [], (problem is not None, *flags))
    if failed:
        raise DataError(problems("training data cannot be used", agree(groups, problem)), on_all_ranks=True)
    return Fetched(share_step(groups, batches, num_micro_batches, fields), counts, sums, tuple(set_flags))
