"""Host memory for saves in the background, allocated while training runs.

Allocating and pinning 25 GB takes longer than copying 25 GB from the GPU: the first save would stop training for that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import torch

from llava_mcore.config.schema import RunConfig

logger = logging.getLogger(__name__)


def is_allocated_ahead(run: RunConfig) -> bool:
    """Return whether a run's saves in the background get their memory before the first one.

    Not with CUDA graphs: torch gives all unused host memory back when it captures one. Nor with an optimizer whose
    state is on the host: little else is copied from the GPU.
    """
    return not (run.model.cuda_graphs or run.optimizer.cpu_offload)


def allocate_in_background(sizes: Sequence[int], device: torch.device) -> threading.Thread:
    """Begin to allocate pinned memory, which torch keeps and gives to the next copies of these sizes.

    Args:
        sizes: bytes of each tensor that a save copies to the host at the same time.
        device: this rank's GPU.
    """

    def allocate() -> None:
        torch.cuda.set_device(device)  # a thread starts with the first GPU, and would use memory there
        try:
            _ = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
        except RuntimeError as error:
            gigabytes = sum(sizes) / 1e9
            logger.warning(
                "%.1f GB of host memory for saves in the background could not be pinned: %s; the first save stops "
                "training while it tries again: free host memory, or omit --async-save", gigabytes, error
            )  # fmt: skip

    thread = threading.Thread(target=allocate, name="host memory", daemon=True)
    thread.start()
    return thread
