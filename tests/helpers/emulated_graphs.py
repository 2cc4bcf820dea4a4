"""CUDA graphs emulated on CPUs: functions whose backward pass returns the gradients of all their layers at once, as
Transformer Engine's graphed callables do."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from torch import Tensor, nn

from llava_mcore.training.graphs import layer_graphs, model_graphs
from llava_mcore.training.graphs.packs import TokenPacks
from llava_mcore.training.optimization import data_parallel

BUCKET = 2000
"""Parameters per bucket of gradients: less than a matrix of the tiny models has."""


class _Graphed(torch.autograd.Function):
    """A call of a part, with its parameters as arguments."""

    @staticmethod
    def forward(ctx: Any, part: nn.Module, num_arguments: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.parameters = inputs[num_arguments:]
        with torch.enable_grad():
            ctx.arguments = tuple(x.detach().requires_grad_(x.requires_grad) for x in inputs[:num_arguments])
            outputs = part(*ctx.arguments)
            ctx.outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return tuple(x.detach() for x in ctx.outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [*ctx.arguments, *ctx.parameters]
        trained = [x for x in inputs if x.requires_grad]
        pairs = [(x, y) for x, y in zip(ctx.outputs, gradients, strict=True) if x.requires_grad]
        outputs, of_outputs = zip(*pairs, strict=True)
        results = iter(torch.autograd.grad(outputs, trained, of_outputs, allow_unused=True))
        return None, None, *[next(results) if x.requires_grad else None for x in inputs]


class EmulatedGraph:
    """Stands for the graph of a part; takes what Transformer Engine's takes."""

    calls = 0
    """Of all graphs together."""

    def __init__(self, part: nn.Module) -> None:
        self._part, self._parameters = part, tuple(part.parameters())

    def __call__(self, *arguments: Tensor, is_first_microbatch: bool) -> Tensor | tuple[Tensor, ...]:
        EmulatedGraph.calls += 1
        results: tuple[Tensor, ...] = _Graphed.apply(self._part, len(arguments), *arguments, *self._parameters)
        return results if len(results) > 1 else results[0]

    def reset(self) -> None:
        """Do nothing: there is nothing to destroy."""


def make_graphs(parts: Sequence[nn.Module], _samples: object, **_: object) -> list[Callable[..., Any]]:
    """Stand for the function of this name in `compat/megatron/graphs.py`."""
    return [EmulatedGraph(part) for part in parts]


@contextlib.contextmanager
def emulated_graphs() -> Iterator[None]:
    """Emulate graphs, and reduce gradients in small buckets during the backward pass, as GPUs do."""
    with (
        mock.patch.object(layer_graphs, "make_graphs", make_graphs),
        mock.patch.object(layer_graphs, "new_pool", lambda: (0, 0)),
        small_buckets(),
    ):
        yield


@contextlib.contextmanager
def small_buckets() -> Iterator[None]:
    """Reduce the gradients of every matrix by themselves, during the backward pass."""

    def overlapping(**settings: Any) -> DistributedDataParallelConfig:
        distributed = settings["use_distributed_optimizer"]
        overlap = {"overlap_grad_reduce": True, "overlap_param_gather": distributed, "bucket_size": BUCKET}
        return DistributedDataParallelConfig(**settings | overlap)

    with mock.patch.object(data_parallel, "DistributedDataParallelConfig", overlapping):
        yield


def use_in(setup: ModuleType) -> None:
    """Let every trainer that `llava_mcore.training.setup` builds in this process use emulated graphs."""
    build = setup.build_trainer
    until_the_end = contextlib.ExitStack()  # the function below keeps it: once it is freed, the patches are undone

    def build_trainer(run: Any, *arguments: Any, **named: Any) -> Any:
        until_the_end.enter_context(emulated_graphs())
        trainer = build(run, *arguments, **named)
        model, [chunk] = trainer.models[0].language_model, trainer.chunks
        segments = model_graphs.decoder_segments(model)
        graphs = layer_graphs.LayerGraphs(segments, model.config, chunk, TokenPacks(run.data.seq_length))
        return dataclasses.replace(trainer, graphs=[graphs])

    setup.build_trainer = build_trainer  # type: ignore[attr-defined]
