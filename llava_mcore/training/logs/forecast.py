"""The prediction of a run on GPUs, and log lines that compare it with measurements."""

from __future__ import annotations

import logging
import statistics

import torch

from llava_mcore.plan.forecast import Forecast, forecast
from llava_mcore.plan.sizes.read_config import model_of
from llava_mcore.training.setup import Trainer

logger = logging.getLogger(__name__)

WARM_UP = 4
"""First iterations of a process, in which kernels are chosen and graphs captured: their times are not compared."""
COMPARED = 3
"""Iterations after these, of whose times the median is compared."""


def forecast_of(trainer: Trainer) -> Forecast | None:
    """Return what is predicted for a run; None without GPUs and where a plan does not apply."""
    groups, hf = trainer.groups, trainer.hf
    if groups.device.type != "cuda":
        return None
    device = torch.cuda.get_device_name()
    return forecast(trainer.run, groups.world_size, lambda: model_of(hf.to_dict(), source="the model"), device)


class BesideForecast:
    """Logs once how a process's first iterations compare with the prediction."""

    def __init__(self, predicted: Forecast, stage: int) -> None:
        """`stage`: the pipeline stage of this rank, whose memory is compared."""
        self._forecast, self._stage = predicted, stage
        self._seconds: list[float] = []

    def step(self, seconds: float, gib: float) -> None:
        """Take note of an iteration, and log after the last one that counts. `gib`: the peak so far."""
        if len(self._seconds) == WARM_UP + COMPARED:
            return
        self._seconds.append(seconds)
        if len(self._seconds) < WARM_UP + COMPARED:
            return
        text, is_off = self._forecast.compare(statistics.median(self._seconds[WARM_UP:]), gib, self._stage)
        if is_off:
            logger.warning("%s; more than 10 %% off (docs/plan.md says what is not counted)", text)
        else:
            logger.info(text)
