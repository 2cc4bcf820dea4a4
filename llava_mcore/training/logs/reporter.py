"""Reports of rank 0 about every iteration: metrics.jsonl, the console, warnings; and how long the start took."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import psutil
import torch

from llava_mcore.errors import os_error_text
from llava_mcore.log import warn_on_failure
from llava_mcore.models.flops import TrainedParts, Workload, mfu, model_flops, peak_flops
from llava_mcore.models.trainable import PARTS
from llava_mcore.training.answers.result import AnswersResult, write_answers
from llava_mcore.training.bad_steps import SpikeAlert
from llava_mcore.training.fetch import StepCounts
from llava_mcore.training.logs.expert_loads import StarvedExperts
from llava_mcore.training.logs.expert_maps import ExpertMaps
from llava_mcore.training.logs.forecast import BesideForecast, forecast_of
from llava_mcore.training.logs.metrics_file import (
    ANSWERS_FILE,
    VALIDATION_FILE,
    JsonLinesWriter,
    Metrics,
    MetricsFile,
    named_values,
)
from llava_mcore.training.logs.pace import Pace
from llava_mcore.training.logs.sinks import Sinks
from llava_mcore.training.saving.state import TrainingProgress
from llava_mcore.training.setup import Trainer
from llava_mcore.training.step import StepResult
from llava_mcore.training.validation import ValidationResult

logger = logging.getLogger(__name__)

HOST_METRICS: dict[str, Callable[[StepCounts, StepResult | None, float], float]] = {}
"""Metrics that rank 0 computes from an iteration's counts, its result (None: not trained on) and its seconds, by their
names in metrics.jsonl."""


class Reporter:
    """Reports the iterations of a run; does nothing on ranks other than 0."""

    def __init__(self, trainer: Trainer, progress: TrainingProgress, times: StartTimes) -> None:
        """Truncate metrics.jsonl to the iteration that the run resumes from.

        Args:
            times: of this process's start; its last phase is the first iteration.

        Raises:
            FileError, OSError, ConfigError: a file of the run cannot be used, or a server rejects the run.
        """
        run, groups = trainer.run, trainer.groups
        self.trainer, self.times = trainer, times
        # Files of the first rank. What follows the iteration that the run resumes from is removed.
        self.file = MetricsFile(run.run_dir, keep_until=progress.iteration) if groups.rank == 0 else None
        self.validations: JsonLinesWriter | None = None
        if groups.rank == 0 and run.validation.eval_interval is not None:
            self.validations = JsonLinesWriter(run.run_dir / VALIDATION_FILE, keep_until=progress.iteration)
        self.rounds: JsonLinesWriter | None = None
        if groups.rank == 0 and run.validation.eval_generate is not None:
            self.rounds = JsonLinesWriter(
                run.run_dir / ANSWERS_FILE, keep_until=progress.iteration, value="exact_match"
            )
        self.sinks = Sinks(run, iteration=progress.iteration) if groups.rank == 0 else None
        # What the lines need: trained parts, pace, the GPU's peak, unusual losses.
        self.trained = _trained_parts(trainer)
        self.problem: str | None = None
        """Why metrics could not be written. The loop ends the run on all ranks then."""
        self.is_first = True
        self.forecast = forecast_of(trainer)
        self.beside = None if self.forecast is None else BesideForecast(self.forecast, groups.pp_rank)
        self.pace = Pace(run.training, is_packed=run.data.packing)
        self.peak = peak_flops(torch.cuda.get_device_name()) if groups.device.type == "cuda" else None
        self.starved = StarvedExperts()
        self.maps: ExpertMaps | None = None
        if groups.rank == 0 and trainer.loads is not None:
            self.maps = ExpertMaps(run.run_dir, keep_until=progress.iteration)
        self.spikes: SpikeAlert | None = None
        if run.faults.alert_spike and self.file is not None:
            self.spikes = SpikeAlert(run.faults.spike_thr, self.file.values)

    def step(
        self,
        progress: TrainingProgress,
        counts: StepCounts,
        result: StepResult | None,
        *,
        sums: Mapping[str, tuple[float, float]],
        rates: Mapping[str, float],
        waited: float,
        seconds: float,
    ) -> None:
        """Report one iteration.

        Args:
            result: None if its batch was not trained on.
            sums: totals and counts by name, of the loader and of the device.
            rates: the learning rate of each part in this iteration.
            waited: seconds until the batch was read.
            seconds: of the whole iteration.
        """
        if self.file is None:
            return
        # Of the schedule's rates, those of trained parts.
        rates = {part: rate for part, rate in rates.items() if part in self.trainer.trained_parts}
        metrics = self._metrics(progress, counts, result, sums, {} if result is None else rates, waited, seconds)
        # How long the start took, once.
        if metrics.start_seconds is not None:
            self.is_first = False
            logger.info(
                "first iteration done %.1f s after the start of its process: %s",
                metrics.time_to_first_iteration_seconds,
                ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in metrics.start_seconds.items()),
            )
        self.pace.add(progress, seconds)
        # The file first: without it the run ends, while a sink is only a copy.
        self._write(self.file, metrics.record())
        if self.sinks is not None:
            self.sinks.step(metrics)
        # The console, and a warning about an unusual loss.
        run = self.trainer.run
        if progress.iteration % run.logging.log_interval == 0:
            total, rest = self.pace.total(progress), self.pace.rest(progress)
            logger.info(metrics.line(total, self.trainer.groups.world_size, rest))
        if self.beside is not None and metrics.memory_gib is not None:
            self.beside.step(seconds, metrics.memory_gib)
        spike = self.spikes.check(progress.iteration, result.loss) if self.spikes is not None and result else None
        starved = None if result is None else self.starved.check(progress.iteration, result.loads)
        for warning in (spike, starved):
            if warning is not None:
                logger.warning(warning)
        if self.maps is not None and result is not None and self.maps.add(progress.iteration, result.loads):
            warn_on_failure("load of experts", self._draw_loads)

    def validation(self, result: ValidationResult) -> None:
        """Report one validation, in its own file."""
        if self.validations is None or self.sinks is None:
            return
        self._write(self.validations, result.record())
        self.sinks.write(result.values(), result.iteration)
        logger.info(result.line())

    def answers(self, result: AnswersResult) -> None:
        """Report a round of answers, in its own files."""
        if self.rounds is None or self.sinks is None:
            return
        self._write(self.rounds, result.record())
        self.sinks.write(result.values(), result.iteration)
        logger.info(result.line())
        warn_on_failure("answers", lambda: self._show(result))

    def _show(self, result: AnswersResult) -> None:
        picture = write_answers(self.trainer.run.run_dir, result)
        if self.sinks is not None and result.examples:
            self.sinks.show(result.examples, picture, result.iteration)

    def _draw_loads(self) -> None:
        drawn = None if self.maps is None else self.maps.draw()
        if drawn is not None and self.sinks is not None:
            self.sinks.image("expert_loads", *drawn)

    def close(self, *, in_a_hurry: bool = False) -> None:
        """Close the sinks, and draw the losses and the load of experts. A second call does nothing.

        Args:
            in_a_hurry: draw no load of experts: this rank is killed soon, and has to say what happened.
        """
        if not in_a_hurry:
            warn_on_failure("load of experts", self._draw_loads)
        sinks, self.sinks = self.sinks, None
        if sinks is not None:
            sinks.close()

    def _write(self, file: JsonLinesWriter, record: dict[str, Any]) -> None:
        try:
            file.write(record)
        except OSError as error:
            self.problem = os_error_text(error)

    def _metrics(
        self,
        progress: TrainingProgress,
        counts: StepCounts,
        result: StepResult | None,
        sums: Mapping[str, tuple[float, float]],
        rates: dict[str, float],
        waited: float,
        seconds: float,
    ) -> Metrics:
        groups = self.trainer.groups
        # Model FLOPs of what the batch contained; none if it was not trained on.
        num_trained = None if result is None else result.num_trained_tokens
        workload = Workload(counts.num_tokens, counts.num_pairs, counts.media, num_trained)
        flops = 0 if result is None else model_flops(self.trainer.hf, workload, self.trained).total
        on_gpu = groups.device.type == "cuda"
        start = self.times.seconds() if self.is_first else None
        # Named sums of which `Metrics` has fields, all others, and metrics that are computed here.
        own_fields, others = named_values(sums)
        others |= {name: metric(counts, result, seconds) for name, metric in HOST_METRICS.items()}
        return Metrics(
            iteration=progress.iteration,
            loss=None if result is None else result.loss,
            grad_norm=None if result is None else result.grad_norm,
            lr=0.0 if result is None else result.lr,
            lr_by_part=rates,
            updated=result is not None and result.updated,
            num_tokens=counts.num_tokens,
            num_trained_tokens=0 if result is None else result.num_trained_tokens,
            num_conversations=counts.num_conversations,
            num_skipped=counts.num_skipped,
            fill=counts.num_tokens / counts.num_positions,
            tokens_per_second=counts.num_tokens / seconds,
            step_seconds=seconds,
            data_wait_seconds=waited,
            consumed_samples=progress.consumed_samples,
            skipped_iterations=progress.skipped_iterations,
            failed_updates=progress.failed_updates,
            tflops_per_device=flops / seconds / groups.world_size / 1e12,
            mfu=None if self.peak is None else mfu(flops, seconds, groups.world_size, self.peak),
            memory_gib=torch.cuda.max_memory_reserved() / 2**30 if on_gpu else None,
            time_to_first_iteration_seconds=None if start is None else sum(start.values()),
            start_seconds=start,
            **own_fields,
            sums=others,
        )


def _trained_parts(trainer: Trainer) -> TrainedParts:
    """Return what gradients are computed for."""
    adapter_setup = trainer.adapter_setup
    parts = trainer.trained_parts if adapter_setup is None else adapter_setup.unfrozen_parts
    adapters = {part: 0 if adapter_setup is None else adapter_setup.num_weights(part) for part in PARTS}
    return TrainedParts(
        language_model="language_model" in parts,
        vision_model="vision_model" in parts,
        vision_projection="vision_projection" in parts,
        language_adapter=adapters["language_model"],
        vision_adapter=adapters["vision_model"],
        projection_adapter=adapters["vision_projection"],
    )


class StartTimes:
    """The phases from the start of this process to the end of its first iteration, the first of them its imports."""

    def __init__(self) -> None:
        self._begun: list[tuple[str, float]] = [("imports", psutil.Process().create_time())]

    def begin(self, phase: str) -> None:
        """End the current phase and begin the next."""
        self._begun.append((phase, time.time()))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of every phase, in order; the last one ends now."""
        return {phase: ended - begun for (phase, begun), (_, ended) in pairwise([*self._begun, ("", time.time())])}
