"""The global batch of a step: reading it, counting its contents, and the limit on skipped samples."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol

from llava_mcore.data.loader.collate import BATCH_SUMS
from llava_mcore.errors import DataError, LlavaMcoreError, problems
from llava_mcore.media.batch_fields import Fields, MediaWork, media_work
from llava_mcore.parallel.agreement import agree
from llava_mcore.parallel.batch import HostBatch
from llava_mcore.parallel.context import uncuttable
from llava_mcore.parallel.groups import Groups, sum_over_ranks
from llava_mcore.parallel.share import SharedStep, share_step

logger = logging.getLogger(__name__)

LEAST_SAMPLES = 1000
"""The rate is computed over at least this many samples, so that one broken sample at the start does not end a run."""
MOST_NAMES = 10


class LoadedBatch(HostBatch, Protocol):
    """A micro-batch from the loader, with its sample keys and the samples that were skipped before it."""

    sample_keys: Sequence[str]
    skipped: Sequence[object]
    sums: dict[str, tuple[int, int]]
    num_pairs: int


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


@dataclass(frozen=True)
class StepCounts:
    """Contents of one step's micro-batches."""

    num_tokens: int = 0
    """With those of images, without padding."""
    num_positions: int = 0
    """Tokens with padding."""
    num_conversations: int = 0
    """Conversations that are trained on."""
    num_skipped: int = 0
    """Conversations that were skipped."""
    num_pairs: int = 0
    """Pairs of tokens in causal attention."""
    num_tiles: int = 0
    """Images of the vision tower's size, of towers that take those."""
    num_patches: int = 0
    """Patches of images of any size, of towers that take those."""
    num_patch_pairs: int = 0
    """Pairs of patches in attention to whole images."""
    num_window_pairs: int = 0
    """Pairs of patches in attention to windows."""
    num_patch_sequences: int = 0
    """Images and frames within which patches see each other."""

    @property
    def num_read(self) -> int:
        """Conversations that were read, skipped ones too."""
        return self.num_conversations + self.num_skipped

    @property
    def media(self) -> MediaWork:
        """The work of the vision tower."""
        pairs = (self.num_patch_pairs, self.num_window_pairs)
        return MediaWork(self.num_tiles, self.num_patches, *pairs, self.num_patch_sequences)


def count(batches: Sequence[LoadedBatch]) -> StepCounts:
    """Count what this rank has loaded for one step."""
    works = [media_work(batch.media) for batch in batches]
    return StepCounts(
        num_tokens=sum(batch.num_tokens for batch in batches),
        num_positions=sum(batch.input_ids.numel() for batch in batches),
        num_conversations=sum(len(batch.sample_keys) for batch in batches),
        num_skipped=sum(len(batch.skipped) for batch in batches),
        num_pairs=sum(batch.num_pairs for batch in batches),
        num_tiles=sum(work.num_tiles for work in works),
        num_patches=sum(work.num_patches for work in works),
        num_patch_pairs=sum(work.num_pairs for work in works),
        num_window_pairs=sum(work.num_window_pairs for work in works),
        num_patch_sequences=sum(work.num_sequences for work in works),
    )


def named_sums(batches: Sequence[LoadedBatch]) -> dict[str, tuple[int, int]]:
    """Add up the named sums of what this rank has loaded for one step: all of BATCH_SUMS, on every rank."""
    unknown = {name for batch in batches for name in batch.sums}.difference(BATCH_SUMS)
    assert not unknown, f"{', '.join(sorted(unknown))}: add the name to BATCH_SUMS in data/loader/collate.py"
    pairs = {name: [batch.sums[name] for batch in batches if name in batch.sums] for name in BATCH_SUMS}
    return {name: (sum(x for x, _ in each), sum(n for _, n in each)) for name, each in pairs.items()}


class StepContents(NamedTuple):
    """The counts and named sums of the global batch, and which flags are set on any rank."""

    counts: StepCounts
    sums: Mapping[str, tuple[int, int]]
    flags: tuple[bool, ...]


def count_all(groups: Groups, batches: Sequence[LoadedBatch], flags: Sequence[bool]) -> StepContents:
    """Count what all ranks have loaded for one step, and find which flags are set on any; one collective call."""
    counts, sums = asdict(count(batches)).values(), [x for pair in named_sums(batches).values() for x in pair]
    totals = sum_over_ranks(groups, [*flags, *counts, *sums])
    set_flags = tuple(count > 0 for count in totals[: len(flags)])
    end = len(flags) + len(counts)
    pairs = zip(totals[end::2], totals[end + 1 :: 2], strict=True)
    return StepContents(StepCounts(*totals[len(flags) : end]), dict(zip(BATCH_SUMS, pairs, strict=True)), set_flags)


@dataclass
class SkipBudget:
    """The share of samples that a run may skip. The totals are over all ranks; `last` holds this rank's latest skips,
    without duplicates from later epochs."""

    max_rate: float
    last: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_NAMES))

    def report(self, batches: Sequence[LoadedBatch]) -> None:
        """Warn about every sample that this rank has skipped."""
        for skip in (skip for batch in batches for skip in batch.skipped):
            logger.warning("skipped: %s", skip)
            if str(skip) in self.last:
                self.last.remove(str(skip))
            self.last.append(str(skip))

    def check(self, groups: Groups, num_used: int, num_skipped: int) -> None:
        """Raise DataError on all ranks if the run has skipped too many; a collective call if so.

        Args:
            num_used, num_skipped: totals of the run, the same on all ranks.
        """
        seen = num_used + num_skipped
        if num_skipped <= self.max_rate * max(seen, LEAST_SAMPLES):
            return
        messages = agree(groups, problems("the last ones", list(self.last)) if self.last else None)
        title = (
            f"{num_skipped} of {seen} samples could not be used, more than data.max_skip_rate = {self.max_rate:g} "
            "(--max-skip-rate) allows; fix the data, or see --on-too-long"
        )
        raise DataError(problems(title, messages), on_all_ranks=True)


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
        flags: further facts that the ranks have to share; the same number on every rank.

    Raises:
        DataError: on all ranks, if any of them could not read its data.
    """
    batches: list[LoadedBatch] | None = None
    problem: str | None = None
    if loader is not None:
        try:
            batches = [next(loader) for _ in range(num_micro_batches)]
            budget.report(batches)
            problem = next(filter(None, (uncuttable(batch, groups.cp_size) for batch in batches)), None)
        except LlavaMcoreError as error:
            problem = str(error)
    # The flag for a problem travels with the counts, which saves one collective call per step.
    counts, sums, (failed, *set_flags) = count_all(groups, batches or [], (problem is not None, *flags))
    if failed:
        raise DataError(problems("training data cannot be used", agree(groups, problem)), on_all_ranks=True)
    return Fetched(share_step(groups, batches, num_micro_batches, fields), counts, sums, tuple(set_flags))


def shared_names(groups: Groups, names: Sequence[str]) -> list[str]:
    """Return the names of a blend's datasets, or the same number of empty names on ranks that read no data; a
    collective call."""
    (count,) = sum_over_ranks(groups, [0 if groups.rank else len(names)])
    return list(names) or [""] * count
