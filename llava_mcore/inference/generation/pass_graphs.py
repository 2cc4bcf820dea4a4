"""Passes over prompts as CUDA graphs, one for each shape.

The kernels of a prompt of a few hundred tokens take a GPU less time than the host needs to launch them one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.models.vision.transformer import VisionTransformer

MOST_TILES = 16
"""The most images that a tower takes as a graph: more take the GPU longer than the host."""
Shapes = tuple[torch.Size, ...]


@dataclass(frozen=True)
class CapturedPass:
    """A graph, and the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    output: Tensor


class PassGraphs:
    """Runs a function of tensors as graphs, one for each combination of their shapes.

    The first call with new shapes runs without a graph, because it may allocate memory that stays and load kernels,
    which a capture may not. The second call captures.
    """

    def __init__(self, compute: Callable[..., Tensor], longest: int) -> None:
        """longest: a call whose first input has more rows runs without a graph."""
        self._compute, self._longest = compute, longest
        self._passes: dict[Shapes, CapturedPass | None] = {}
        self._pool: Any = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the function's result, which the next call with these shapes overwrites."""
        shapes = tuple(x.shape for x in inputs)
        if len(inputs[0]) > self._longest:
            return self._compute(*inputs)
        if shapes not in self._passes:
            self._passes[shapes] = None
            return self._compute(*inputs)
        captured = self._passes[shapes]
        if captured is None:
            captured = self._passes[shapes] = self._captured(inputs)
        for buffer, value in zip(captured.inputs, inputs, strict=True):
            buffer.copy_(value)
        captured.graph.replay()
        return captured.output

    def destroy(self) -> None:
        """Free all graphs. NCCL waits for this before it ends a communicator whose messages they hold.

        Shapes that have been called are captured by their next call.
        """
        for captured in self._passes.values():
            if captured is not None:
                captured.graph.reset()
        self._passes = dict.fromkeys(self._passes)

    def _captured(self, inputs: tuple[Tensor, ...]) -> CapturedPass:
        # Only one graph runs at a time, so they share their memory.
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph, inputs = torch.cuda.CUDAGraph(), tuple(x.clone() for x in inputs)
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = self._compute(*inputs)
        return CapturedPass(graph, inputs, output)


def tile_graphs(model: VisionLanguageModel) -> PassGraphs:
    """Let a tower run as graphs, until its attribute `forward` is deleted."""
    tower = model.vision_model
    graphs = PassGraphs(partial(tower.forward, media={}), MOST_TILES)
    vars(tower)["forward"] = lambda tiles, *_: graphs(tiles)
    return graphs


def has_tiles(model: VisionLanguageModel) -> bool:
    """Return whether a model's tower takes images of one size, all of them on this rank, and nothing else."""
    return isinstance(model.vision_model, VisionTransformer) and not model.divides_media
