"""Energon 7.4.1 ends the run if a line of a .jsonl is nested too deeply; this patch makes it a broken sample."""

from __future__ import annotations

from megatron.energon import CrudeSample
from megatron.energon.flavors.jsonl.crude_jsonl_dataset import DefaultCrudeJsonlDatasetFactory
from megatron.energon.flavors.webdataset.structs import FilteredSample

from llava_mcore.compat.required import replace_name, required

_load = required(DefaultCrudeJsonlDatasetFactory, "_load_sample")


def _load_or_refuse(self: DefaultCrudeJsonlDatasetFactory, sample: FilteredSample) -> CrudeSample:
    try:
        return _load(self, sample)
    except RecursionError as error:
        raise ValueError(f"the line is nested too deeply: {error}") from error


def skip_nested_lines() -> None:
    """Make energon skip and count such a line. A second call changes nothing.

    Raises:
        AttributeError: this version of energon reads lines differently.
    """
    replace_name(DefaultCrudeJsonlDatasetFactory, "_load_sample", _load_or_refuse)
