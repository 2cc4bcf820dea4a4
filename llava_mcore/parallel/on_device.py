"""Progress and results of the device's work, which the host reads without stopping it."""

from __future__ import annotations

import time

import torch
from torch import Tensor


class DeviceEvent:
    """A point in the device's work: it is reached when all that was launched before is done."""

    def __init__(self, device: torch.device) -> None:
        self._seconds = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    @property
    def is_reached(self) -> bool:
        """Whether the device has come this far; the host does not wait."""
        return self._event is None or self._event.query()

    def seconds_since(self, earlier: DeviceEvent) -> float:
        """Return the device's time between two moments; the host waits for both."""
        if self._event is None or earlier._event is None:
            return self._seconds - earlier._seconds
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1000


class AsyncHostCopy:
    """A copy of a few numbers on the host, for which neither host nor device waits until they are read."""

    def __init__(self, values: Tensor) -> None:
        """values: one dimension; later changes of it have no effect."""
        on_gpu = values.device.type == "cuda"
        self._values = torch.empty(values.shape, dtype=torch.float64, pin_memory=on_gpu)
        self._values.copy_(values, non_blocking=True)
        self._copied = torch.cuda.current_stream().record_event() if on_gpu else None

    def read(self) -> list[float]:
        """Return the numbers; the host waits for them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()
