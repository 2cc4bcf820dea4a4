"""Opens one stream of a run's data, as energon opens a rank's data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ryml
from megatron.energon import SavableDataset, WorkerConfig, get_train_dataset, get_val_dataset
from megatron.energon.epathlib import EPath

from llava_mcore.compat.energon.jsonl import skip_nested_lines
from llava_mcore.compat.energon.memory import forget_read_members
from llava_mcore.compat.energon.named_code import NamedCodeError, refuse_named_code
from llava_mcore.compat.energon.passes import count_passes
from llava_mcore.compat.energon.repeat import repeat_parts_exactly
from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.loader.sample_problems import raise_data_error
from llava_mcore.data.loader.streams import Stream
from llava_mcore.data.loader.task_encoder import ChatTaskEncoder
from llava_mcore.data.samples import Batch
from llava_mcore.data.storage.blend import SPLIT
from llava_mcore.data.storage.dataset_path import VALIDATION
from llava_mcore.data.storage.remote import locate
from llava_mcore.data.storage.shard_reader import read_shards_directly
from llava_mcore.data.storage.tar_files import OPEN_SHARDS
from llava_mcore.errors import DataError

SAMPLES_PER_SLICE = 100
"""Consecutive samples that are read before another position in the data is drawn, when shuffling."""


def open_stream(
    index: int,
    num_streams: int,
    data: DataConfig,
    encoder: ChatTaskEncoder,
    batch_size: int,
    *,
    validation: bool = False,
) -> Stream:
    """Open one stream, which energon treats as a separate rank.

    Args:
        validation: read every sample of the validation split once, in the order of the shards.
    """
    assert data.path is not None
    forget_read_members()
    OPEN_SHARDS.close_all()  # the path may have other data by now
    # Patches of energon that must be there when it opens the data.
    skip_nested_lines()
    repeat_parts_exactly()
    refuse_named_code()
    # A stream is a rank of energon's with a single worker: it reads its own part, by its own random numbers.
    workers = WorkerConfig(
        rank=index,
        world_size=num_streams,
        num_workers=1,
        seed_offset=encoder.seed,
        global_error_handler=encoder.skips,
        restore_error_handler=raise_data_error,
    )
    # Validation reads in the order of the shards; training repeats, and shuffles if asked to.
    shuffles = data.shuffle_buffer_size > 1
    common: dict[str, Any] = {"worker_config": workers, "batch_size": batch_size, "task_encoder": encoder}
    dataset: SavableDataset[Batch]
    try:
        if validation:
            dataset = get_val_dataset(locate(data.path), split_part=VALIDATION, **common)
        else:
            dataset = get_train_dataset(
                locate(data.path),
                split_part=SPLIT,
                shuffle_buffer_size=data.shuffle_buffer_size if shuffles else None,
                max_samples_per_sequence=SAMPLES_PER_SLICE if shuffles else None,
                **common,
            )
    except NamedCodeError as error:
        raise DataError(f"{data.path} is refused, see its .nv-meta/dataset.yaml: {error}") from error
    # Energon mostly finds errors in dataset.yaml, split.yaml or a blend by assertions and look-ups.
    except (
        AssertionError,
        KeyError,
        TypeError,
        AttributeError,
        ImportError,
        RecursionError,
        ryml.ExceptionBasic,
    ) as error:
        raise DataError(f"{data.path} cannot be opened, see its .nv-meta/dataset.yaml: {error!r}") from error
    # Replacements inside the opened dataset.
    read_shards_directly(dataset, data.max_sample_bytes)
    if encoder.augmentation is not None:
        count_passes(dataset)
    return Stream(dataset, workers, encoder.skips, name=str(data.path))


def check_streams(streams: dict[int, Stream], num_streams: int, leaves: Sequence[Path | EPath]) -> None:
    """Check that every stream has a sample: one without would end and make the other ranks wait."""
    if any(stream.dataset.len_worker(0) == 0 for stream in streams.values()):
        raise DataError(
            f"{', '.join(map(str, leaves))}: fewer samples than the {num_streams} streams that the data is divided "
            "into; lower data.num_streams"
        )
