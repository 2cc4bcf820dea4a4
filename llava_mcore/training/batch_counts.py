"""Counts of what one training step has loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from llava_mcore.media.batch_fields import MediaWork, media_work
from llava_mcore.parallel.batch import HostBatch
from llava_mcore.parallel.groups import Groups, sum_over_ranks


class LoadedBatch(HostBatch, Protocol):
    """A micro-batch from the loader, with its sample keys and the samples that were skipped before it."""

    sample_keys: Sequence[str]
    skipped: Sequence[object]
    num_truncated: int
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
    num_truncated: int = 0
    """Conversations that were truncated."""
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
        num_truncated=sum(batch.num_truncated for batch in batches),
        num_pairs=sum(batch.num_pairs for batch in batches),
        num_tiles=sum(work.num_tiles for work in works),
        num_patches=sum(work.num_patches for work in works),
        num_patch_pairs=sum(work.num_pairs for work in works),
        num_window_pairs=sum(work.num_window_pairs for work in works),
        num_patch_sequences=sum(work.num_sequences for work in works),
    )


def count_all(
    groups: Groups, batches: Sequence[LoadedBatch], flags: Sequence[bool]
) -> tuple[StepCounts, tuple[bool, ...]]:
    """Count what all ranks have loaded for one step, and find which flags are set on any; one collective call."""
    totals = sum_over_ranks(groups, [*flags, *asdict(count(batches)).values()])
    return StepCounts(*totals[len(flags) :]), tuple(count > 0 for count in totals[: len(flags)])
