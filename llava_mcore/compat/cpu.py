"""Run megatron-core 0.19 on a machine without CUDA, over gloo. With CUDA, `install` at most fixes torch's optimizer.

megatron-core uses "the current CUDA device", CUDA generators and streams unconditionally; here all of them are the
CPU's. As a consequence "CUDA" and CPU random numbers are one stream: code that draws random numbers on one rank only
must use its own generator. Packages that only work on GPUs count as not installed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _device

from llava_mcore.compat.gloo import use_one_thread
from llava_mcore.compat.required import replace_name, required

_CPU = torch.device("cpu")


class _TypeName(str):
    """A tensor's type name that also equals its CUDA twin: megatron-core compares with torch.cuda.FloatTensor."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str(self) == other or self.replace("torch.", "torch.cuda.", 1) == other

    def __ne__(self, other: object) -> bool:
        return not self == other


class _CpuGenerators:
    """`torch.cuda.default_generators[device]`: the generator that CPU kernels draw from."""

    def __getitem__(self, device: object) -> torch.Generator:
        return torch.default_generator


class _NoStream:
    """A stream or an event: kernels run in program order on a CPU, so waiting for one does nothing."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self, event: object = None) -> _NoStream:
        return self

    def synchronize(self) -> None: ...

    def wait(self, stream: object = None) -> None: ...


_OPTIMIZERS = ("transformer_engine", "apex")
"""Packages whose optimizers megatron-core uses in place of torch's."""


@functools.cache
def install() -> None:
    """Prepare torch and megatron-core for this machine. Call before anything imports megatron.core."""
    if torch.cuda.is_available():
        if not any(importlib.util.find_spec(package) for package in _OPTIMIZERS):
            _patch_distributed_optimizer()
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("llava_mcore.parallel must be imported before megatron.core on a machine without CUDA")
    # megatron-core uses their optimizers and norms whenever it can import them, as in a container on a login node.
    for package in _OPTIMIZERS:
        sys.modules[package] = None  # type: ignore[assignment]
    use_one_thread()
    _patch_torch()
    _patch_distributed_optimizer()


_CONSTRUCTORS = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like")


def _patch_torch() -> None:
    stream = _NoStream()
    for_cuda = {
        "current_device": lambda: _CPU,  # megatron-core only uses it as a `device=` argument
        "synchronize": lambda device=None: None,
        "current_stream": lambda device=None: stream,
        "Stream": _NoStream,  # the dispatcher of tokens to experts copies on one of its own
        "stream": lambda stream: contextlib.nullcontext(),
        "default_generators": _CpuGenerators(),
        "_lazy_call": lambda function, **_: function(),  # otherwise queued until CUDA starts, which never happens
    }
    for_random = {
        "get_rng_state": lambda device="cuda": torch.default_generator.get_state(),
        "set_rng_state": lambda state, device="cuda": torch.default_generator.set_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)),
    }
    _replace_names(torch.cuda, for_cuda | for_random)
    _replace_names(torch.cuda.random, for_random)
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed within GPU RNG context" not in record.getMessage()
    )
    # `with torch.device(...)` recognizes constructors by identity: let it register the originals first.
    required(_device, "_device_constructors")()
    _replace_names(torch, {name: _on_cpu(required(torch, name)) for name in _CONSTRUCTORS})
    _patch_classes()
    # megatron.core.jit compiles small functions; on a CPU that costs a second of every start, and half a minute later.
    replace_name(torch, "compile", _not_compiled)


def _replace_names(owner: object, values: dict[str, Any]) -> None:
    """Replace all names or, if the owner lacks one of them, none."""
    for name in values:
        required(owner, name)
    for name, value in values.items():
        replace_name(owner, name, value)


def _not_compiled(function: Any = None, **_: Any) -> Any:
    return (lambda decorated: decorated) if function is None else function


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)  # only a GPU's driver pins memory
        return function(*args, **kwargs)

    return wrapped


def _patch_classes() -> None:
    tensor_type = required(torch.Tensor, "type")

    def type_name(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return _TypeName(tensor_type(self))
        return tensor_type(self, dtype, *args, **kwargs)

    _replace_names(torch.Tensor, {"cuda": lambda self, *args, **kwargs: self, "type": type_name})
    replace_name(torch.nn.Module, "cuda", lambda self, *args, **kwargs: self)


def _patch_distributed_optimizer() -> None:
    """Make checkpoints of DistributedOptimizer over torch.optim.AdamW load (without TE and Apex; 0.19.2).

    Upstream, a load misses or overwrites "step", gives all parameters one step tensor (AdamW then advances it once per
    parameter) and copies into a leaf view outside no_grad.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    set_states = required(DistributedOptimizer, "_set_main_param_and_optimizer_states")
    load = required(DistributedOptimizer, "load_state_dict")

    def set_main_param_and_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        # "step" comes with the parameter groups in load_state_dict; here it is absent or stale.
        with torch.no_grad():
            set_states(self, model_param, {**tensors, "step": None})

    def load_state_dict(self: Any, state_dict: Any) -> None:
        load(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    replace_name(DistributedOptimizer, "_set_main_param_and_optimizer_states", set_main_param_and_states)
    replace_name(DistributedOptimizer, "load_state_dict", load_state_dict)
