"""Predictions and choices for a run that is about to start, or has started, on GPUs that are there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import LlavaMcoreError
from llava_mcore.plan import report
from llava_mcore.plan.balance import balanced_layers, stage_keys
from llava_mcore.plan.dataset import material_of
from llava_mcore.plan.hardware.efficiency import Efficiency
from llava_mcore.plan.hardware.gpus import GIB, GPUS, Gpu, gpu_of_device
from llava_mcore.plan.layout import layout_of
from llava_mcore.plan.predict import Prediction
from llava_mcore.plan.search import TOWERS, Searched, changed, search
from llava_mcore.plan.seconds import Machine
from llava_mcore.plan.sizes.model import Model
from llava_mcore.plan.sizes.read_config import read_model

TOO_LARGE = 1.1
"""Times a GPU's memory from which on a prediction is a warning: it is within 5 % in most measured runs, not in all."""
BEYOND = 0.1
"""Difference from the prediction that is a warning."""
STAND_IN = "h200"
"""Kind of GPU to choose for where the machine's is not in the table: ratios of times are similar."""
_DIVIDED = "the processes of --tp divide its layers"
_UNDIVIDED = "each process of --tp has all of it, for a part of the images"
LEAST_GAIN = 0.01
"""Part of a step that whole towers must save: they take memory, and predictions cannot tell less."""
_OTHERWISE = "--vision-data-parallel on or off decides otherwise"


@dataclass(frozen=True)
class Forecast:
    """The prediction for a run."""

    searched: Searched
    prediction: Prediction

    @property
    def gpu(self) -> Gpu:
        """The kind of GPU that was found."""
        return self.searched.gpu

    def reserved(self, stage: int) -> float:
        """Return the GiB that torch should reserve on a GPU of a stage."""
        return self.prediction.stages[stage].memory.reserved / GIB

    def warning(self) -> str | None:
        """Return that the run cannot fit, with the nearest layout that does; None if it may fit."""
        needed, there = self.prediction.memory, self.gpu.memory
        if needed <= TOO_LARGE * there:
            return None
        result = search(self.searched)
        text = f"this run will probably not fit: predicted are {needed:.0f} GiB of a {self.gpu.name}'s {there:.0f}"
        if not result.fitting:
            return f"{text}, and no other layout fits on these GPUs (python -m llava_mcore plan; docs/plan.md)"
        # The nearest: the fewest values that differ from the run's, then the fastest.
        best = min(
            result.fitting, key=lambda x: (_differences(self.searched.run, x.run), -x.prediction.tokens_per_second)
        )
        values = " ".join(report.differences(best, self.searched))
        return f"{text}; the nearest layout that fits, in {best.prediction.memory:.0f} GiB: {values}"

    def out_of_memory(self, stage: int) -> str:
        """Return the prediction for a message about missing memory."""
        return (
            f"predicted were {self.reserved(stage):.1f} GiB on a GPU of pipeline stage {stage}, of "
            f"{self.gpu.memory:.0f}; "
            "`python -m llava_mcore plan` lists layouts that fit (docs/plan.md)"
        )

    def compare(self, seconds: float, gib: float, stage: int) -> tuple[str, bool]:
        """Return the prediction beside what was measured, and whether they differ by more than 10 %."""
        expected, memory = self.prediction.seconds, self.reserved(stage)
        off = seconds / expected - 1, gib / memory - 1
        text = (
            f"predicted: {expected:.2f} s per iteration and {memory:.1f} GiB; "
            f"measured: {seconds:.2f} s ({off[0]:+.0%}) and {gib:.1f} GiB ({off[1]:+.0%})"
        )
        return text, max(map(abs, off)) > BEYOND


def forecast(run: RunConfig, world: int, read: Callable[[], Model], device: str) -> Forecast | None:
    """Predict a run. None where a plan does not apply: an unknown GPU, sizes it cannot read, an adapter from a folder.

    Args:
        read: returns the model's sizes.
        device: the GPU's name in torch.
    """
    gpu = gpu_of_device(device)
    if gpu is None or run.adapter.load is not None or run.training.precision == "fp32":
        return None
    try:
        searched = _searched(run, world, read(), gpu)
        return Forecast(searched, searched.predict(run))
    except (LlavaMcoreError, ValueError):
        return None


def _searched(run: RunConfig, world: int, model: Model, gpu: Gpu) -> Searched:
    """Return a search that begins at a run."""
    smallest, largest = run.data.min_pixels or model.pixels[0], run.data.max_pixels or model.pixels[1]
    model = replace(model, pixels=(smallest, largest))
    return Searched(model, material_of(model, run.data.path).samples, run, world, Machine(gpu, Efficiency()))


@dataclass(frozen=True)
class ChosenTower:
    """A run with the choice, and a line for the log; None: nothing was to choose."""

    run: RunConfig
    words: str | None = None


def with_tower(run: RunConfig, world: int, hf_dir: Path, device: str | None) -> ChosenTower:
    """Replace --vision-data-parallel auto in a run by `on` or `off`; by `off` if the model's sizes cannot be read."""
    if run.parallel.vision_data_parallel != "auto" or run.parallel.tensor_model_parallel_size == 1:
        return ChosenTower(run)
    result = None if device is None else gpu_of_device(device)
    try:
        return chosen_tower(_searched(run, world, read_model(hf_dir), result or GPUS[STAND_IN]), result)
    except (LlavaMcoreError, ValueError):
        return ChosenTower(changed(run, {TOWERS: "off"}))


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


def balanced(run: RunConfig, world: int, hf_dir: Path, device: str | None) -> RunConfig:
    """Return a run with parallel.balance: auto as one with numbers of layers for its stages.

    Raises:
        ConfigError: a model whose sizes cannot be read.
    """
    result = None if device is None else gpu_of_device(device)
    searched = _searched(run, world, read_model(hf_dir), result or GPUS[STAND_IN])
    model, pp = searched.model, run.parallel.pipeline_model_parallel_size
    num_layers = model.decoder.num_layers
    resolved = {"parallel.balance": "none"}
    if pp > num_layers:  # the rules of stages say so
        return changed(run, resolved)
    usual = layout_of(run, world, num_layers)
    each = num_layers // pp
    layout = replace(usual, layers=(*[each] * (pp - 1), num_layers - each * (pp - 1)))
    memory = None if result is None else result.memory
    layers = balanced_layers(model, layout, searched.packs_of(layout), searched.machine, memory=memory)
    return changed(run, {**resolved, **stage_keys(layers)})


def _differences(run: RunConfig, other: RunConfig) -> int:
    """Return how many options of a layout differ; the sizes of groups count most."""
    one, two = run.parallel, other.parallel
    count = 3 * (one.tensor_model_parallel_size != two.tensor_model_parallel_size)
    count += 3 * (one.context_parallel_size != two.context_parallel_size)
    count += 3 * (one.pipeline_model_parallel_size != two.pipeline_model_parallel_size)
    count += run.training.micro_batch_size != other.training.micro_batch_size
    count += run.model.recompute != other.model.recompute
    return count + sum(
        vars(one)[name] != vars(two)[name] for name in vars(one) if name.startswith(("num_layers", "vision", "use_"))
    )
