"""Synthetic global batches that are the same at every layout: images and text-only samples mixed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from llava_mcore.media.batch_fields import FEATURE_POSITIONS, NO_SCALE, PIXEL_SCALE, PIXEL_VALUES
from llava_mcore.models.architectures.registry import features_per_tile
from llava_mcore.models.vision.features import image_side
from llava_mcore.parallel.batch import no_dataset_ids

LENGTH = 48


@dataclass
class FakeBatch:
    """The fields of a data batch."""

    input_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    media: dict[str, Tensor]
    cu_seqlens: Tensor
    num_tokens: int
    sample_keys: list[str]
    skipped: list[object] = field(default_factory=list)
    sums: dict[str, tuple[int, int]] = field(default_factory=dict)
    num_pairs: int = 0
    dataset_ids: Tensor = field(default_factory=no_dataset_ids)


def sample(hf: PretrainedConfig, index: int, *, text_only: bool) -> dict[str, Tensor]:
    """One sample: ids and mask [LENGTH], tiles [k, 3, h, w] (several if they take few tokens), their positions."""
    g = torch.Generator().manual_seed(1000 + index)
    n, size = features_per_tile(hf), image_side(hf.vision_config)
    ids = torch.randint(5, 300, (LENGTH,), generator=g)
    mask = torch.zeros(LENGTH)
    num_tiles = 1 + index % max(12 // n, 1)
    start, answer = 2 + index % 3, num_tiles * n + 8
    mask[answer : answer + 6 + index % 9] = 1  # ragged, so that averaging over tokens matters
    if text_only:
        return {"ids": ids, "mask": mask, "pixels": torch.empty(0, 3, size, size), "places": torch.empty(0).long()}
    places = torch.cat([torch.arange(n) + start + i * (n + 1) for i in range(num_tiles)])  # a mark between two
    ids[places] = hf.image_token_id
    return {"ids": ids, "mask": mask, "pixels": torch.randn(num_tiles, 3, size, size, generator=g), "places": places}


def micro_batch(hf: PretrainedConfig, indices: list[int], text_only: set[int]) -> FakeBatch:
    """Collate samples as the data pipeline does."""
    rows = [sample(hf, i, text_only=i % 8 in text_only) for i in indices]
    ids = torch.stack([x["ids"] for x in rows])
    labels = torch.roll(ids, -1, 1)
    mask = torch.stack([x["mask"] for x in rows])
    return FakeBatch(
        input_ids=ids,
        labels=labels * mask.long(),
        loss_mask=mask,
        position_ids=torch.arange(LENGTH).expand(len(rows), -1).contiguous(),
        media={
            PIXEL_VALUES: torch.cat([x["pixels"] for x in rows]),
            PIXEL_SCALE: NO_SCALE,
            FEATURE_POSITIONS: torch.cat([x["places"] + i * LENGTH for i, x in enumerate(rows)]),
        },
        cu_seqlens=torch.empty(0, dtype=torch.int32),
        num_tokens=ids.numel(),
        sample_keys=[str(i) for i in indices],
    )


class FakeLoader:
    """Delivers the same global batches whatever the data-parallel size: sample s goes to micro-batch s // size."""

    def __init__(self, hf: PretrainedConfig, *, micro_batch_size: int, dp_rank: int, dp_size: int, text_only: set[int]):
        self.hf, self.size, self.rank, self.dp, self.text_only = hf, micro_batch_size, dp_rank, dp_size, text_only
        self.count = 0

    def __next__(self) -> FakeBatch:  # 16 samples over and over: they can be trained
        first = (self.count * self.dp + self.rank) * self.size
        self.count += 1
        return micro_batch(self.hf, [i % 16 for i in range(first, first + self.size)], self.text_only)

    def state(self) -> Any:
        return self.count

    def restore(self, state: Any) -> None:
        self.count = state

    def read_again(self, state: Any, number: int) -> list[FakeBatch]:
        now, self.count = self.count, state
        batches = [next(self) for _ in range(number)]
        self.count = now
        return batches


class PackedLoader(FakeLoader):
    """The samples of FakeLoader, each up to its last trained token, one after the other in a single row."""

    sample_multiple = 1

    def __next__(self) -> FakeBatch:
        padded = super().__next__()
        ends = [int(row.nonzero().max()) + 2 for row in padded.loss_mask]
        ends = [-(-end // self.sample_multiple) * self.sample_multiple for end in ends]
        ends[-1] += -sum(ends) % 8  # the real loader's multiple
        positions = padded.media[FEATURE_POSITIONS]
        return FakeBatch(
            input_ids=_joined(padded.input_ids, ends),
            labels=_joined(padded.labels, ends),
            loss_mask=_joined(padded.loss_mask, ends),
            position_ids=_joined(padded.position_ids, ends),
            media=padded.media
            | {FEATURE_POSITIONS: positions % LENGTH + torch.tensor([0, *ends]).cumsum(0)[positions // LENGTH]},
            cu_seqlens=torch.tensor([0, *ends]).cumsum(0).to(torch.int32),
            num_tokens=sum(ends),
            sample_keys=padded.sample_keys,
        )


class DivisiblePacks(PackedLoader):
    """The same, of samples that two context-parallel ranks can divide."""

    sample_multiple = 4


class FullPackLoader(FakeLoader):
    """The whole samples of FakeLoader one after the other, as full packs; every other one has one sample more."""

    def __next__(self) -> FakeBatch:
        padded = super().__next__()
        rows = len(padded.input_ids)
        bounds = list(range(0, LENGTH * rows + 1, LENGTH))
        if self.count % 2:  # what follows the last trained token
            bounds.insert(-1, LENGTH * (rows - 1) + int(padded.loss_mask[-1].nonzero().max()) + 2)
        padded.cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
        for name in ("input_ids", "labels", "loss_mask", "position_ids"):
            setattr(padded, name, getattr(padded, name).reshape(1, -1))
        return padded


def _joined(rows: Tensor, ends: list[int]) -> Tensor:
    return torch.cat([row[:end] for row, end in zip(rows, ends, strict=True)])[None]
