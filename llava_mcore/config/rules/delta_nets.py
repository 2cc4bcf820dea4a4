"""Rules for models whose layers have gated delta nets (Qwen3.5)."""

from __future__ import annotations

from collections.abc import Iterator

from llava_mcore.config.rules.dims import ModelDims
from llava_mcore.config.schema import RunConfig

FP8_MULTIPLE = 16
"""Dimensions of FP8 matrix products must be multiples of this."""


def check_delta_nets(run: RunConfig, dims: ModelDims, source: str) -> Iterator[str]:
    """Yield what such a model cannot do."""
    if not dims.delta_key_heads:
        return
    if run.model.cuda_graphs:
        yield f"--cuda-graphs cannot capture the delta nets of {source}, which read lengths on the host: omit it"
    tp = run.parallel.tensor_model_parallel_size
    if run.training.fp8 and dims.delta_width % (FP8_MULTIPLE * tp):
        yield (
            f"--fp8: the width of the delta nets' first matrix, which is {dims.delta_width} in {source}, is not a "
            f"multiple of {FP8_MULTIPLE * tp}: {'lower --tp, or ' if tp > 1 else ''}omit --fp8"
        )


def check_kernels(
    dims: ModelDims, *, deterministic: bool, has_gpus: bool, has_kernels: bool, wrong_triton: str | None = None
) -> list[str]:
    """Return why a machine cannot train such a model.

    Args:
        deterministic: torch computes it, on GPUs too.
        has_kernels: flash-linear-attention's are installed.
        wrong_triton: the version of Triton with which these have no gradients on this machine's GPUs.
    """
    if not dims.delta_key_heads or not has_gpus or deterministic:
        return []
    if not has_kernels:
        return [MISSING_KERNELS]
    return [] if wrong_triton is None else [no_gradients(wrong_triton)]


def no_gradients(triton: str) -> str:
    """Say that these kernels cannot train. `triton`: its version."""
    return (
        f"this model has gated delta nets, whose kernels have no gradients with Triton {triton} on Hopper GPUs, where "
        "its results would be wrong: use Triton 3.7.1 or newer, which comes with newer versions of torch, or pip "
        "install tilelang, or train with --deterministic, which is many times slower"
    )


MISSING_KERNELS = (
    "this model has gated delta nets, which need flash-linear-attention on GPUs: pip install "
    "'llava-mcore[delta]', or train with --deterministic, which is many times slower"
)
