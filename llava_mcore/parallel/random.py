"""This rank's random number generators, and the choice of deterministic kernels."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel

_PRIME = 1_000_003
"""Between the seeds of data-parallel ranks, so that they do not meet those of stages and tensor-parallel ranks."""


def seed_everything(seed: int) -> None:
    """Seed torch and megatron-core's tensor-parallel generators; every pipeline stage gets different numbers.

    Data-parallel ranks get the same ones, with which they create the same weights.
    """
    _seed(seed + 100 * parallel_state.get_pipeline_model_parallel_rank())


def seed_replicas(seed: int) -> None:
    """Seed the generators again once all weights exist: data- and context-parallel ranks, which have different tokens,
    draw different dropout masks from now on."""
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    _seed(seed + 100 * parallel_state.get_pipeline_model_parallel_rank() + _PRIME * replica)


def _seed(stage_seed: int) -> None:
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)


def make_deterministic() -> None:
    """Allow deterministic kernels only. Call before CUDA starts; torch raises where no such kernel exists."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it starts
    os.environ.setdefault("NCCL_ALGO", "Ring")  # one order of summation
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # Transformer Engine's attention; megatron-core insists on it
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def random_state() -> dict[str, Any]:
    """Return the state of all generators that training draws from."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_random_state(states: dict[str, Any]) -> None:
    """Restore the state of all generators from `random_state`."""
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore all generators on exit."""
    states = random_state()
    try:
        yield
    finally:
        set_random_state(states)
