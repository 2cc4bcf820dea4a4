"""The thin layer between energon and the pure functions of this package."""

from __future__ import annotations

from typing import Any

import torch
from megatron.energon import Cooker, Sample, SourceInfo, TaskEncoder, stateless
from megatron.energon.flavors.webdataset.sample_loader import RawSampleData

from llava_mcore.data.assets import Assets
from llava_mcore.data.collate import check_length, collate
from llava_mcore.data.cooking import TextDecoder, chat_from_standard, cook_vqa
from llava_mcore.data.samples import Batch, ChatSample, EncodedSample
from llava_mcore.errors import DataError


class ChatTaskEncoder(TaskEncoder[Sample, EncodedSample, Batch, Batch]):
    """Encodes samples and batches them. Every step is stateless, so a loader's place can be restored exactly.

    Packing belongs into `select_samples_to_pack` and `pack_selected_samples`, between `encode_sample` and `batch`.
    """

    decoder = TextDecoder()
    cookers = (Cooker(cook_vqa),)

    def __init__(self, assets: Assets, *, seq_length: int) -> None:
        """seq_length: tokens of a padded sample."""
        self.assets = assets
        self.seq_length = seq_length

    @stateless
    def encode_sample(self, sample: Sample) -> EncodedSample:
        """Tokenise and decode one sample. DataError if it is broken or longer than seq_length."""
        chat: ChatSample = chat_from_standard(sample)
        tokens = self.assets.chat.encode(chat.turns, num_images=len(chat.images))
        check_length(len(tokens.input_ids), self.seq_length)
        return EncodedSample.derive_from(
            chat,
            input_ids=torch.from_numpy(tokens.input_ids),
            trained=torch.from_numpy(tokens.trained),
            image_positions=torch.from_numpy(tokens.image_positions),
            pixel_values=self.assets.images(chat.images),
        )

    @stateless
    def batch(self, samples: list[EncodedSample]) -> Batch:
        """Pad samples to one micro-batch."""
        return collate(samples, seq_length=self.seq_length, pad_token_id=self.assets.pad_token_id)


def raise_data_error(error: Exception, sample: Any, sources: list[SourceInfo] | None) -> None:
    """Energon's error handler: say where the sample lies and what is wrong with it, and end the loading.

    sample is whatever the failing step was given: raw parts, a sample, or a list of samples.
    """
    if isinstance(sample, RawSampleData):
        sources = [s for part in sample.data if part is not None for s in part["__sources__"]]
    reason = str(error) if isinstance(error, (DataError, ValueError)) else f"{type(error).__name__}: {error}"
    places = [f"{s.dataset_path}: shard {s.shard_name}, sample {_stem(s)}" for s in sources or ()]
    raise DataError(f"{'; '.join(dict.fromkeys(places)) or 'a sample of unknown place'}: {reason}") from error


def _stem(source: SourceInfo) -> str:
    """A sample's key with the parts that were read of it, such as `000012 (jpg, json, txt)`."""
    names = [name.rpartition("/")[2].partition(".") for name in source.file_names]
    folder = source.file_names[0].rpartition("/")[0] if source.file_names else ""
    if not names:
        return f"number {source.index} (none of the wanted parts)"
    return f"{folder and folder + '/'}{names[0][0]} ({', '.join(part for _, _, part in names)})"
