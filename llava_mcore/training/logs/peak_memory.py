"""The most GPU memory that a process has needed."""

from __future__ import annotations

import torch

from llava_mcore.config.schema import RunConfig


def peak_memory_gib(run: RunConfig) -> float:
    """Return the most GPU memory in use so far, in GiB.

    With CUDA graphs it is what torch has taken from the GPU, because they keep memory between their passes that torch
    does not count as allocated.
    """
    peak = torch.cuda.max_memory_reserved if run.model.cuda_graphs else torch.cuda.max_memory_allocated
    return peak() / 2**30
