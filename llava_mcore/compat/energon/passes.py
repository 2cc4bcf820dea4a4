"""Energon 7.4.1 counts the samples that a stream has read of a dataset, but does not say in which pass a sample is.

The count is a part of a sample's restore key, so it is also right for samples of restored buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from megatron.energon import SavableDataset, WorkerConfig
from megatron.energon.flavors.webdataset.sample_loader import WebdatasetSampleLoaderDataset
from megatron.energon.wrappers.base import BaseWrapperDataset
from megatron.energon.wrappers.map_dataset import MapDataset

from llava_mcore.compat.required import required

_KEY = "llava_mcore.pass"
"""Key in a sample's subflavors, which energon hands on from step to step."""


class SamplePass(NamedTuple):
    """The dataset of a sample, by its index in the blend, and how often its stream had read all its samples before."""

    dataset: int
    pass_index: int


def count_passes(dataset: SavableDataset[Any]) -> None:
    """Let every sample of a stream say its pass (`pass_of`). Call it once, after the stream has been opened.

    Raises:
        AttributeError: this version of energon counts differently.
    """
    required(WorkerConfig, "active_worker_sample_index")
    for index, source in enumerate(_sources(dataset)):
        # Energon is told that there is one loader process, number 0.
        source.map_fn = partial(_with_pass, source.map_fn, index, source.dataset.len_worker(0))


def pass_of(subflavors: dict[str, Any] | None) -> SamplePass:
    """Return the pass of a sample with these subflavors."""
    result: SamplePass = (subflavors or {})[_KEY]
    return result


def _sources(dataset: SavableDataset[Any]) -> Iterator[MapDataset[Any, Any]]:
    """Yield the steps that turn what was read from shards into samples, one for each dataset."""
    if isinstance(dataset, MapDataset) and isinstance(dataset.dataset, WebdatasetSampleLoaderDataset):
        yield dataset
    elif isinstance(dataset, BaseWrapperDataset):
        for inner in dataset.datasets:
            yield from _sources(inner)


def _with_pass(load: Callable[[Any], Any], index: int, num_samples: int, raw: Any) -> Any:
    sample = load(raw)
    worker = WorkerConfig.active_worker_config
    assert worker is not None, "samples are read in an active stream"
    place = SamplePass(index, worker.active_worker_sample_index // num_samples)
    if isinstance(sample, dict):
        sample["__subflavors__"] = {**(sample.get("__subflavors__") or {}), _KEY: place}
    else:
        sample.__subflavors__ = {**(sample.__subflavors__ or {}), _KEY: place}
    return sample
