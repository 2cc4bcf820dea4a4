"""Packing during training: takes energon's samples and yields packs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.energon import SavableDataset, WorkerConfig
from megatron.energon.wrappers.base import BaseWrapperDataset, SampleIndex
from megatron.energon.wrappers.buffer import SavableSampleBuffer

from llava_mcore.data.loader.best_fit import PatchBudget, fullest_pack
from llava_mcore.data.samples import TokenSample


class PackingDataset(BaseWrapperDataset[TokenSample, TokenSample]):
    """Keeps a buffer of samples and always builds the fullest pack that contains the oldest one.

    Energon's own packing empties its buffer before it reads more, so the last packs of each buffer stay half empty. A
    buffer that is refilled after every pack reaches the same fill with a tenth of the size.
    """

    _savable_fields = ("_waiting", "_pack_index")

    def __init__(
        self,
        dataset: SavableDataset[TokenSample],
        *,
        buffer_size: int,
        capacity: int,
        most_patches: int | None = None,
        worker_config: WorkerConfig,
    ) -> None:
        """buffer_size: samples waiting to be packed; capacity, most_patches: maximum tokens and patches of a pack."""
        super().__init__(dataset, worker_config=worker_config)
        self.buffer_size = buffer_size
        self.capacity = capacity
        self.most_patches = most_patches
        self.reset_state_own()

    def reset_state_own(self) -> None:
        """Clear the buffer."""
        self._waiting = SavableSampleBuffer(self.dataset, worker_config=self.worker_config)
        self._pack_index = SampleIndex(self.worker_config, src=self)

    def len_worker(self, worker_idx: int | None = None) -> int:
        """Return an upper bound for the number of packs: the number of samples."""
        return self.dataset.len_worker(worker_idx)

    def __iter__(self) -> Iterator[TokenSample]:
        self._waiting.worker_start()
        source = self._waiting.append_iter()
        while True:
            while self._waiting.len_worker() < self.buffer_size and next(source, None) is not None:
                pass
            if not self._waiting.len_worker():
                return
            yield self._next_pack()

    def _next_pack(self) -> TokenSample:
        waiting = self._waiting.buffer
        media = None
        if self.most_patches is not None:
            media = PatchBudget([sample.num_patches for sample in waiting], self.most_patches)
        chosen = fullest_pack([sample.num_tokens for sample in waiting], self.capacity, media)
        samples = [self._waiting.buffer[index] for index in chosen]
        for index in reversed(chosen):
            self._waiting.pop(index)
        keys = tuple(sample.__restore_key__ for sample in samples)
        return TokenSample(
            __key__="+".join(sample.__key__ for sample in samples),
            __restore_key__=(type(self).__name__, self._pack_index.get_next(), *keys),
            __sources__=tuple(source for sample in samples for source in sample.__sources__ or ()),
            conversations=[conversation for sample in samples for conversation in sample.conversations],
            num_tokens=sum(sample.num_tokens for sample in samples),
            num_patches=sum(sample.num_patches for sample in samples),
        )

    def config(self) -> dict[str, Any]:
        """Return what energon records about a dataset."""
        return {
            "type": type(self).__qualname__,
            "buffer_size": self.buffer_size,
            "capacity": self.capacity,
            "most_patches": self.most_patches,
            "dataset": self.dataset.config(),
        }
