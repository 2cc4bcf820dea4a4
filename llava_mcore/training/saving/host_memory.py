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


STEPS_WITH_GRAPHS = 4
"""Most shapes of CUDA graphs occur in these steps. When torch captures one, it gives all unused host memory back."""


def steps_before_allocation(run: RunConfig) -> int | None:
    """Return after how many steps the memory for saves in the background is allocated.

    None: not before the first save. With an optimizer whose state is on the host, little else is copied from the GPU.
    """
    if run.optimizer.cpu_offload:
        return None
    return STEPS_WITH_GRAPHS if run.model.cuda_graphs else 1


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
