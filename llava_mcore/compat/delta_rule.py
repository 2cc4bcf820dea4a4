"""The gated delta rule and its convolution: flash-linear-attention's kernels, and transformers' torch functions.

Also what megatron-core 0.19.2's gated delta net needs to be built without flash-linear-attention, and on the CPU.
Import `llava_mcore.parallel` first, as for megatron.core itself.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.ssm.gated_delta_net import common, gdn
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from transformers.models.qwen3_5 import modeling_qwen3_5

from llava_mcore.compat.required import replace_name, required

_HOPPER = 9
"""Major compute capability of H100 and H200."""
_WRONG_TRITON = SpecifierSet(">=3.4,<3.7.1")


def has_fla() -> bool:
    """Return whether flash-linear-attention's kernels are installed, without importing it."""
    spec = importlib.util.find_spec("fla")
    places = [] if spec is None else spec.submodule_search_locations or []
    return any((Path(place) / "ops").is_dir() for place in places)


def triton_without_gradients(capabilities: Collection[tuple[int, int]]) -> str | None:
    """Return the version of Triton if the kernels' backward pass refuses it: fla-core 0.6.0 does so on Hopper for
    Triton from 3.4 on and before 3.7.1, whose gradients are wrong there, unless tilelang is installed.

    Args:
        capabilities: of the GPUs.
    """
    if all(major != _HOPPER for major, _ in capabilities) or importlib.util.find_spec("tilelang") is not None:
        return None
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # an image's own build under another name
        return None
    return version if _WRONG_TRITON.contains(Version(version).base_version) else None


def capabilities_of_gpus() -> set[tuple[int, int]]:
    """Return the compute capabilities of this machine's GPUs without starting CUDA; empty if nvidia-smi says nothing.

    The launcher asks before anything starts; a rank knows its own.
    """
    if shutil.which("nvidia-smi") is None:
        return set()
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    parts = (line.strip().partition(".") for line in said.splitlines())
    return {(int(major), int(minor)) for major, _, minor in parts if major.isdigit() and minor.isdigit()}


class FlaKernels(NamedTuple):
    """flash-linear-attention's causal convolution, chunked gated delta rule, and RMSNorm times an activated gate."""

    convolve: Callable[..., Any]
    rule: Callable[..., Any]
    gated_norm: Callable[..., Any]


@cache
def fla_kernels() -> FlaKernels:
    """Return flash-linear-attention's kernels, on GPUs only. AttributeError if a version lacks one."""
    places = {
        "causal_conv1d": "fla.modules.convolution",
        "chunk_gated_delta_rule": "fla.ops.gated_delta_rule",
        "rms_norm_gated": "fla.modules.fused_norm_gate",
    }
    return FlaKernels(*(required(importlib.import_module(module), name) for name, module in places.items()))


@cache
def torch_rule() -> Callable[..., Any]:
    """Return transformers' chunked gated delta rule in torch, also where it would use a kernel."""
    return _torch_function("torch_chunk_gated_delta_rule")


@cache
def torch_step() -> Callable[..., Any]:
    """Return transformers' gated delta rule for one token after another, in torch."""
    return _torch_function("torch_recurrent_gated_delta_rule")


def _torch_function(name: str) -> Callable[..., Any]:
    """Return a function of transformers without its choice of kernels.

    Raises:
        AttributeError: transformers has no such function, or one with other parameters.
    """
    function = inspect.unwrap(required(modeling_qwen3_5, name))
    expected = {"query", "key", "value", "g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel"}
    missing = expected - inspect.signature(function).parameters.keys()
    if missing:
        raise AttributeError(f"transformers' {name} has no {', '.join(sorted(missing))}: llava_mcore relies on it")
    return function


@contextlib.contextmanager
def building_without_kernels(*, on_cpu: bool) -> Iterator[None]:
    """Let megatron-core build a gated delta net in the block: it refuses to without flash-linear-attention, whose
    functions its own forward pass calls, and puts some parameters on the current GPU.

    Args:
        on_cpu: put these parameters where torch puts new tensors, which may be the meta device.
    """
    device = torch.empty(0).device
    # It asks for a function of each, which it would call in its own forward pass.
    own_rule = required(common, "torch_chunk_gated_delta_rule")
    values: list[tuple[Any, str, Any]] = [(common, "HAVE_FLA", True), (gdn, "chunk_gated_delta_rule", own_rule)]
    if on_cpu:
        values.append((torch.cuda, "current_device", lambda: device))
    before = [required(owner, name) for owner, name, _ in values]
    for owner, name, value in values:
        replace_name(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(values, before, strict=True):
            replace_name(owner, name, value)
