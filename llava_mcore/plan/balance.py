"""Stages of a pipeline that take equally long: the tower's stage gets fewer decoder layers, and the last one, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from llava_mcore.plan.hardware.gpus import GIB
from llava_mcore.plan.layout import RunLayout
from llava_mcore.plan.memory import stage_memory
from llava_mcore.plan.seconds import Machine, stage_passes
from llava_mcore.plan.sizes.model import Model
from llava_mcore.plan.work import PackWork, Work

FIRST, LAST = "parallel.num_layers_in_first_pipeline_stage", "parallel.num_layers_in_last_pipeline_stage"


def divisions(num_layers: int, pp: int) -> Iterator[tuple[int, ...]]:
    """Yield the layers of each stage for all divisions that a configuration can express."""
    if pp == 1:
        yield (num_layers,)
        return
    if pp == 2:
        yield from ((first, num_layers - first) for first in range(1, num_layers))
        return
    for middle in range(1, (num_layers - 2) // (pp - 2) + 1):
        ends = num_layers - middle * (pp - 2)
        # A first stage with more layers than the middle ones and the tower does not occur.
        yield from ((first, *[middle] * (pp - 2), ends - first) for first in range(1, min(ends, middle + 3)))


def balanced_layers(
    model: Model, layout: RunLayout, packs: PackWork, machine: Machine, *, memory: float | None = None
) -> tuple[int, ...]:
    """Return the layers of each stage for the shortest step. Of equally good divisions the evenest.

    Args:
        layout: its `layers` are ignored.
        memory: GiB that a stage may take; None: any. If no division fits, the one whose fullest stage takes least.
    """
    work = packs.mean.times(layout.micro_batch_size)
    num_layers, pp = sum(layout.layers), layout.pp
    if pp == 1:
        return (num_layers,)
    # Times of a stage are those of its layers and of what is beside them.
    usual = max(2, num_layers // pp)
    full, half = (replace(layout, layers=(n,) * pp) for n in (usual, usual // 2))
    first, last = (_seconds(model, full, work, place, machine) for place in (0, pp - 1))
    of_layer = (last - _seconds(model, half, work, pp - 1, machine)) / (usual - usual // 2)
    first, last = first - usual * of_layer, last - usual * of_layer
    beside = {0: first, pp - 1: last}
    micro_batches = layout.num_micro_batches

    def step(layers: tuple[int, ...]) -> float:
        times = [n * of_layer + beside.get(stage, 0.0) for stage, n in enumerate(layers)]
        return micro_batches * max(times) + sum(times) - max(times)

    def key(layers: tuple[int, ...]) -> tuple[float, int]:
        return round(step(layers) / of_layer, 6), max(layers) - min(layers)

    allowed = [x for x in divisions(num_layers, pp) if x[0] >= min(model.num_deepstack, num_layers)]
    ordered = sorted(allowed, key=key)
    if memory is None:
        return ordered[0]
    fullest = {layers: _fullest(model, replace(layout, layers=layers), packs, machine) for layers in ordered[:40]}
    return next((x for x, needed in fullest.items() if needed <= memory), min(fullest, key=lambda x: fullest[x]))


def stage_keys(layers: tuple[int, ...]) -> Mapping[str, int | None]:
    """Return the values of the configuration keys for a division; None if all stages are equal."""
    if len(set(layers)) == 1:
        return {FIRST: None, LAST: None}
    return {FIRST: layers[0], LAST: layers[-1]}


def _seconds(model: Model, layout: RunLayout, work: Work, stage: int, machine: Machine) -> float:
    forward, backward = stage_passes(model, layout, work, stage, machine)
    return forward.total + backward.total


def _fullest(model: Model, layout: RunLayout, packs: PackWork, machine: Machine) -> float:
    return max(stage_memory(model, layout, packs, stage, machine.fit).total for stage in range(layout.pp)) / GIB
