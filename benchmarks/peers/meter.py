"""The time, tokens and memory of a product's training steps: JSON lines, one per step, written by rank 0."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

OUT = "PEER_OUT"
"""Environment variable: the file of the lines."""
STEPS = "PEER_STEPS"
"""Environment variable: after how many steps a rank ends, without a checkpoint."""


class Meter:
    """Measures from one wait for all GPUs to the next. `count` each micro-batch between `begin` and `end`."""

    def __init__(self, stack: dict[str, Any]) -> None:
        """`stack`: components and settings, which the first line repeats."""
        self._stack = stack
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._sums = torch.zeros(4, dtype=torch.float64)
        self._step = 0
        self._start = 0.0

    def count(self, tokens: Tensor | int, trained: Tensor | int, samples: int, positions: int) -> None:
        """Add a micro-batch of this rank: real tokens, those with a loss, conversations, and tokens with padding."""
        self._sums += torch.tensor([int(tokens), int(trained), samples, positions], dtype=torch.float64)

    def begin(self) -> None:
        """Start a step."""
        if self._step == 0 and self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        _wait()
        self._start = time.perf_counter()

    def end(self, loss: float) -> None:
        """End a step, and this process after the last one."""
        _wait()
        seconds = time.perf_counter() - self._start
        sums = self._sums.to(self._device, copy=True)
        memory = torch.tensor(torch.cuda.max_memory_reserved() / 2**30 if self._device.type == "cuda" else 0.0)
        memory = memory.to(self._device)
        if dist.is_initialized():
            dist.all_reduce(sums)
            dist.all_reduce(memory, dist.ReduceOp.MAX)
        self._sums.zero_()
        self._step += 1
        tokens, trained, samples, positions = (int(x) for x in sums.tolist())
        line = {"step_seconds": seconds, "num_tokens": tokens, "num_trained": trained, "num_conversations": samples}
        line |= {"fill": tokens / max(1, positions), "memory_gib": memory.item(), "loss": loss}
        if int(os.environ.get("RANK", "0")) == 0:
            with Path(os.environ[OUT]).open("a", encoding="utf-8") as file:
                print(json.dumps(line | ({"stack": self._stack} if self._step == 1 else {})), file=file)
            print(json.dumps(line), flush=True)
        if self._step == int(os.environ[STEPS]):
            leave()
        self._start = time.perf_counter()


def leave() -> None:
    """End this rank together with the others, without what the product does at its end."""
    sys.stdout.flush()
    sys.stderr.flush()
    _wait()
    os._exit(0)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
