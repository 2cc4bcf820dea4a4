"""How full the packs are: ours compared with energon's own packing at the same buffer size, both through energon."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from megatron.energon import Sample, SavableDataset, SkipSample, WorkerConfig, get_train_dataset, stateless

from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.loader.packing import best_fit
from llava_mcore.data.loader.sample_problems import Skips
from llava_mcore.data.loader.task_encoder import ChatTaskEncoder
from llava_mcore.data.samples import EncodedSample, TokenSample


class Undecoded(ChatTaskEncoder):
    """Packs as training does, but leaves the pictures out: only lengths count here."""

    @stateless
    def postencode_sample(self, sample: TokenSample) -> EncodedSample:
        return EncodedSample.derive_from(
            sample, conversations=sample.conversations, pixel_values=torch.empty(0, 3, 1, 1, dtype=torch.uint8)
        )


class EnergonPacks(Undecoded):
    """The same with energon's hooks: it hands over its whole buffer and reads on when that is used up."""

    def select_samples_to_pack(self, samples: list[TokenSample]) -> list[list[TokenSample]]:
        packs = best_fit([sample.num_tokens for sample in samples], self.data.seq_length)
        return [[samples[index] for index in pack] for pack in packs]

    @stateless
    def pack_selected_samples(self, samples: list[TokenSample]) -> EncodedSample:
        conversations = [conversation for sample in samples for conversation in sample.conversations]
        joined = TokenSample.derive_from(samples[0], conversations=conversations)
        return self.postencode_sample(joined)

    def build_batch(self, dataset: SavableDataset[Any], **options: Any) -> SavableDataset[Any]:
        return super(ChatTaskEncoder, self).build_batch(dataset, **options)


def fill(path: Path, assets: Assets, *, seq_length: int, buffer_size: int, num_packs: int, energons: bool) -> float:
    """Return the fraction of the first packs of an endless stream that holds tokens."""
    data = DataConfig(path=path, seq_length=seq_length, packing=True, packing_buffer_size=buffer_size)
    encoder = (EnergonPacks if energons else Undecoded)(data, assets, Skips(stop_if_too_long=False))
    workers = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=encoder.skips)
    dataset: SavableDataset[Sample] = get_train_dataset(
        path,
        split_part="train",
        worker_config=workers,
        batch_size=1,
        shuffle_buffer_size=data.shuffle_buffer_size,
        max_samples_per_sequence=100,
        packing_buffer_size=buffer_size if energons else None,
        task_encoder=encoder,
    )
    workers.worker_activate(0)
    try:
        batches = itertools.islice(iter(dataset), num_packs)
        tokens = [batch.num_tokens for batch in batches]  # type: ignore[attr-defined]
    except SkipSample as error:
        raise RuntimeError("a sample does not fit") from error
    finally:
        workers.worker_deactivate()
    return sum(tokens) / (len(tokens) * seq_length)
