"""Counts of what one training step has loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, Protocol

from llava_mcore.data.loader.collate import BATCH_SUMS
from llava_mcore.media.batch_fields import MediaWork, media_work
from llava_mcore.parallel.batch import HostBatch
from llava_mcore.parallel.groups import Groups, sum_over_ranks


class LoadedBatch(HostBatch, Protocol):
    """A micro-batch from the loader, with its sample keys and the samples that were skipped before it."""

    sample_keys: Sequence[str]
    skipped: Sequence[object]
    sums: dict[str, tuple[int, int]]
    num_pairs: int


@dataclass(frozen=True)
class StepCounts:
    """Contents of one step's micro-batches."""

    num_tokens: int = 0
    """With those of pictures, without padding."""
    num_positions: int = 0
    """Tokens with padding."""
    num_conversations: int = 0
    """Conversations that are trained on."""
    num_skipped: int = 0
    """Conversations that were skipped."""
    num_pairs: int = 0
    """Pairs of tokens in causal attention."""
    num_tiles: int = 0
    """Pictures of the vision tower's size, of towers that take those."""
    num_patches: int = 0
    """Patches of pictures of any size, of towers that take those."""
    num_patch_pairs: int = 0
    """Pairs of patches in attention to whole pictures."""
    num_window_pairs: int = 0
    """Pairs of patches in attention to windows."""
    num_patch_sequences: int = 0
    """Pictures and frames within which patches see each other."""

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
