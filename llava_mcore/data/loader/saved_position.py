"""A saved position in the data: the settings that it belongs to, and energon's state as plain containers.

Checkpoints need no pickles of energon's classes: the state is a tree of its dataclasses and dicts, whose leaves are
numbers, strings, bytes (energon's generators), tensors and arrays (the global generators), and the ids of the samples
in the shuffle buffer. It has no sample data.
"""

from __future__ import annotations

import dataclasses
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.energon.flavors.webdataset.sample_loader import SliceState
from megatron.energon.rng import SystemRngState
from megatron.energon.savable_loader import SavableDataLoaderState, SavableDatasetCheckpoint, SavableDatasetState
from megatron.energon.state import FlexState

from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.storage.dataset_path import fingerprint, nested_fingerprint

MICRO_BATCH = "training.micro_batch_size"
NUM_STREAMS = "data.num_streams"
PACKING = "data.packing"
PROCESSORS = "processors"
ON_TOO_LONG = "data.on_too_long"
"""Recorded since settings without effect are left out; before, they were None."""
ONLY_PACKING = ("data.packing_buffer_size", "data.seq_length", "data.max_media_tokens")
"""Settings that older positions hold as None without packing, whatever they were."""


def settings_to_resume_with(
    data: DataConfig, assets: Assets, path: Path | str, seed: int, micro_batch_size: int
) -> dict[str, Any]:
    """Return the settings that determine samples, their order and which of them are dropped, by their names in
    messages.

    Settings without effect are left out. So is the sequence length of samples that are not packed: it may change, as
    docs/data.md says.
    """
    # These settings decide something only where samples are packed.
    packing = {"data.packing_buffer_size": data.packing_buffer_size, "data.seq_length": data.seq_length}
    return {
        PROCESSORS: assets.images.settings(),
        NUM_STREAMS: data.num_streams,
        "data.shuffle_buffer_size": data.shuffle_buffer_size,
        PACKING: data.packing,
        **(packing if data.packing else {}),
        "data.max_media_tokens": data.max_media_tokens,
        ON_TOO_LONG: data.on_too_long,
        "data.max_sample_bytes": data.max_sample_bytes,
        "data.max_text_chars": data.max_text_chars,
        "data.max_picture_pixels": data.max_picture_pixels,
        "data.max_frames": data.max_frames,
        MICRO_BATCH: micro_batch_size,
        "training.seed": seed,
        "data.lang": assets.lang,
        "data.special_tokens_in_text": data.special_tokens_in_text,
        "data.min_pixels": assets.pixels.smallest,
        "data.max_pixels": assets.pixels.largest,
        "data.video_min_pixels": assets.video_pixels.smallest,
        "data.video_max_pixels": assets.video_pixels.largest,
        "megatron-energon": version("megatron-energon"),
        "data (made by energon prepare)": fingerprint(path),
        "data (blends in the blend; split_config and dataset_config)": nested_fingerprint(path),
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the differences in settings that prevent a saved position from being used.

    Only settings in both are compared: one that is missing has no effect there, or an older version did not record it.
    A position is counted in micro-batches; it can be converted to smaller ones that divide them.
    """
    before = _recorded(before)
    names = [name for name in before if name in now and name not in (MICRO_BATCH, PROCESSORS)]
    mismatches = [
        f"{name}: saved with {_said(before[name])}, now {_said(now[name])}"
        for name in names
        if before[name] != now[name]
    ]
    if PROCESSORS in before:
        saved, current = before[PROCESSORS], now[PROCESSORS]
        mismatches += [
            f"{name}: saved with {saved.get(name, 'none')}, now {current.get(name, 'none')}"
            for name in sorted(saved.keys() | current.keys())
            if saved.get(name) != current.get(name)
        ]
    size = before.get(MICRO_BATCH, now[MICRO_BATCH])
    if size % now[MICRO_BATCH]:
        fitting = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        mismatches.append(f"{MICRO_BATCH}: saved with {size}, now {now[MICRO_BATCH]}; it may become {fitting}")
    return mismatches


def _recorded(before: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a position without those that an older version did not record."""
    if ON_TOO_LONG in before or before.get(PACKING):
        return before
    return {name: value for name, value in before.items() if name not in ONLY_PACKING}


def _said(value: Any) -> Any:
    return "none" if value is None else value


KIND = "__kind__"
RECORDS: dict[str, Any] = {
    record.__name__: record
    for record in (
        SavableDataLoaderState,
        SavableDatasetCheckpoint,
        SavableDatasetState,
        SystemRngState,
        SliceState,
    )
}


def to_plain(value: Any) -> Any:
    """Return value as dicts, lists, tuples, numbers, strings, bytes and tensors, which `torch.load` reads safely.

    Raises TypeError for an unknown class.
    """
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, np.ndarray):
        return {KIND: "ndarray", "dtype": str(value.dtype), "data": torch.from_numpy(value.astype(np.int64))}
    if isinstance(value, (list, tuple)):
        return type(value)(to_plain(item) for item in value)
    if isinstance(value, dict):
        fields = {key: to_plain(item) for key, item in value.items()}
        return {KIND: "FlexState", "fields": fields} if isinstance(value, FlexState) else fields
    name = type(value).__name__
    if not dataclasses.is_dataclass(value) or RECORDS.get(name) is not type(value):
        raise TypeError(f"a loader state holds a {type(value)!r}, which cannot be saved")
    return {KIND: name, "fields": {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}}


def from_plain(value: Any) -> Any:
    """The inverse of `to_plain`. Raises KeyError or TypeError for invalid input."""
    if isinstance(value, (list, tuple)):
        return type(value)(from_plain(item) for item in value)
    if not isinstance(value, dict):
        return value
    if KIND not in value:
        return {key: from_plain(item) for key, item in value.items()}
    if value[KIND] == "ndarray":
        return value["data"].numpy().astype(value["dtype"])
    fields = {key: from_plain(item) for key, item in value["fields"].items()}
    return FlexState(fields) if value[KIND] == "FlexState" else RECORDS[value[KIND]](**fields)
