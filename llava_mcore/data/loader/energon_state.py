"""Energon's loader state as plain containers, so that checkpoints do not need pickles of energon's classes.

The state is a tree of energon's dataclasses and dicts. Its leaves are numbers, strings, bytes (energon's generators),
tensors and arrays (the global generators), and the ids of the samples in the shuffle buffer; it has no sample data.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from megatron.energon.flavors.webdataset.sample_loader import SliceState
from megatron.energon.rng import SystemRngState
from megatron.energon.savable_loader import SavableDataLoaderState, SavableDatasetCheckpoint, SavableDatasetState
from megatron.energon.state import FlexState

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
