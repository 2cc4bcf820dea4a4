"""The choice between a vision tower whose layers tensor-parallel ranks divide, and whole towers for whose images they
do, by the plan's arithmetic (--vision-data-parallel auto)."""

from __future__ import annotations

from dataclasses import dataclass

from llava_mcore.config.schema import RunConfig
from llava_mcore.plan.hardware.gpus import Gpu
from llava_mcore.plan.search import TOWERS, Searched, changed

_DIVIDED = "the processes of --tp divide its layers"
_UNDIVIDED = "each process of --tp has all of it, for a part of the images"
LEAST_GAIN = 0.01
"""Part of a step that whole towers must save: they take memory, and predictions cannot tell less."""
_OTHERWISE = "--vision-data-parallel on or off decides otherwise"


@dataclass(frozen=True)
class ChosenTower:
    """A run with the choice, and a line for the log; None: nothing was to choose."""

    run: RunConfig
    words: str | None = None


def chosen_tower(searched: Searched, gpu: Gpu | None) -> ChosenTower:
    """Return the run of a search, of --tp 2 or more, with `on` or `off` in place of `auto`.

    It follows from shapes, assumed or counted images and the kind of GPU alone, so that all nodes, and a run that is
    resumed, choose the same. What a rule refuses is not chosen.

    Args:
        gpu: whose memory is a limit; None: not known.
    """
    run = searched.run
    undivided, divided = (changed(run, {TOWERS: x}) for x in ("on", "off"))
    # What rules say of both is no reason.
    refused_undivided, refused_divided = (searched.problems(x) for x in (undivided, divided))
    if set(refused_undivided) - set(refused_divided):
        return ChosenTower(divided, f"vision tower: {_DIVIDED}, as whole ones are refused")
    if set(refused_divided) - set(refused_undivided):
        return ChosenTower(undivided, f"vision tower: {_UNDIVIDED}, since its widths cannot be divided")
    if refused_undivided:
        return ChosenTower(divided)
    one, two = searched.predict(undivided), searched.predict(divided)
    if gpu is not None and two.memory <= gpu.usable < one.memory:
        needed = f"whole ones would need {one.memory:.1f} GiB of {gpu.usable:.1f}"
        return ChosenTower(divided, f"vision tower: {_DIVIDED}, as {needed} ({_OTHERWISE})")
    is_undivided = one.seconds < (1 - LEAST_GAIN) * two.seconds
    this, other = (one, two) if is_undivided else (two, one)
    why = f"predicted for a {searched.gpu.name}: {this.seconds:.3f} s per iteration, otherwise {other.seconds:.3f}"
    return ChosenTower(
        undivided if is_undivided else divided,
        f"vision tower: {_UNDIVIDED if is_undivided else _DIVIDED}; {why} ({_OTHERWISE})",
    )
