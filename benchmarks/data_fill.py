"""How full the packs are: those of our loader compared with energon's own packing at the same buffer size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.energon import Cooker, Sample, TaskEncoder, WorkerConfig, get_train_dataset, stateless

from llava_mcore.config.rules.batch_size import BatchSizes
from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.encode.conversation import TextDecoder, chat_from_standard, cook_chat
from llava_mcore.data.loader.datasets import open_datasets
from llava_mcore.data.loader.open_streams import mixture_of, open_reader, open_streams
from llava_mcore.data.loader.packing import best_fit
from llava_mcore.data.loader.sample_problems import Skips
from llava_mcore.data.loader.task_encoder import ChatTaskEncoder
from llava_mcore.data.samples import Batch, EncodedSample, TokenSample


class Undecoded(ChatTaskEncoder):
    """Leaves the images out: only lengths count here."""

    def postencode_sample(self, sample: TokenSample) -> EncodedSample:
        return EncodedSample.derive_from(
            sample, conversations=sample.conversations, pixel_values=torch.empty(0, 3, 1, 1, dtype=torch.uint8)
        )


class EnergonPacks(TaskEncoder[Sample, EncodedSample, Batch, Batch]):
    """The same steps as energon's hooks: it hands over its whole buffer and reads on when that is used up."""

    decoder = TextDecoder()
    cookers = (Cooker(cook_chat),)

    def __init__(self, encoder: ChatTaskEncoder) -> None:
        self.encoder = encoder

    @stateless
    def preencode_sample(self, sample: Sample) -> TokenSample:
        return self.encoder.preencode_sample(chat_from_standard(sample))

    def select_samples_to_pack(self, samples: list[TokenSample]) -> list[list[TokenSample]]:
        packs = best_fit([sample.num_tokens for sample in samples], self.encoder.data.seq_length)
        return [[samples[index] for index in pack] for pack in packs]

    @stateless
    def pack_selected_samples(self, samples: list[TokenSample]) -> EncodedSample:
        conversations = [conversation for sample in samples for conversation in sample.conversations]
        return self.encoder.postencode_sample(TokenSample.derive_from(samples[0], conversations=conversations))

    def batch(self, samples: list[EncodedSample]) -> Batch:
        return self.encoder.batch(samples)


def fill(path: Path, assets: Assets, *, seq_length: int, buffer_size: int, num_packs: int, energons: bool) -> float:
    """Return the fraction of the first packs of an endless stream that holds tokens."""
    data = DataConfig(path=path, seq_length=seq_length, packing=True, packing_buffer_size=buffer_size)
    encoder = Undecoded(data, assets, Skips(stop_if_too_long=False))
    batches = energon_batches(path, encoder, buffer_size) if energons else our_batches(path, data, encoder)
    tokens = [batch.num_tokens for batch in itertools.islice(batches, num_packs)]
    return sum(tokens) / (len(tokens) * seq_length)


def our_batches(path: Path, data: DataConfig, encoder: ChatTaskEncoder) -> Iterator[Batch]:
    """Yield the packs of one stream."""
    datasets = open_datasets(path, max_sample_bytes=data.max_sample_bytes)
    mixture = mixture_of(datasets, data, num_streams=1, seed=1)
    reader = open_reader(data, datasets, encoder)
    yield from open_streams([0], mixture, data, reader, batch_size=1, global_batch_sizes=BatchSizes.of(1, None))[0]


def energon_batches(path: Path, encoder: ChatTaskEncoder, buffer_size: int) -> Iterator[Batch]:
    """Yield the packs of energon's stream."""
    workers = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=encoder.skips)
    dataset = get_train_dataset(
        path,
        split_part="train",
        worker_config=workers,
        batch_size=1,
        shuffle_buffer_size=100,
        max_samples_per_sequence=100,
        packing_buffer_size=buffer_size,
        task_encoder=EnergonPacks(encoder),
    )
    workers.worker_activate(0)
    try:
        yield from dataset
    finally:
        workers.worker_deactivate()
