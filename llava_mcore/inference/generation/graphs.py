"""Passes as CUDA graphs: the host launches all kernels of a pass with one call.

A pass of single tokens reads all weights for a few tokens, and a prompt has a few hundred tokens: a GPU takes less time
for either than the host needs to launch the kernels one by one.
"""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.attention import Attention
from torch import Tensor

from llava_mcore.inference.generation.cache import CachedAttention
from llava_mcore.inference.generation.rows import CachedRows, whole_pieces
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.models.vision.transformer import VisionTransformer

MOST_TILES = 16
"""The most images that a tower takes as a graph: more take the GPU longer than the host."""
Shapes = tuple[torch.Size, ...]


def can_capture(models: Sequence[VisionLanguageModel], device: torch.device) -> bool:
    """Return whether a model's passes can be graphs: they must not vary, and must stay on one GPU or between
    tensor-parallel ones.

    Routers send different numbers of tokens to experts, delta nets replace their states, and stages of a pipeline wait
    for each other.
    """
    model = models[0]
    is_whole = len(models) == 1 and model.pre_process and model.post_process
    config = model.config
    varies = config.num_moe_experts or config.fp8 or config.context_parallel_size > 1
    if device.type != "cuda" or not is_whole or varies:
        return False
    mixers = [layer.self_attention for layer in model.language_model.decoder.layers]
    return all(isinstance(x, Attention) and isinstance(x.core_attention, CachedAttention) for x in mixers)


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

    def __init__(self, compute: Callable[..., Tensor], longest: int | None = None) -> None:
        """longest: a call whose first input has more rows runs without a graph; None: there is no limit."""
        self._compute, self._longest = compute, longest
        self._passes: dict[Shapes, CapturedPass | None] = {}
        self._pool: Any = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the function's result, which the next call may overwrite."""
        shapes = tuple(x.shape for x in inputs)
        if self._longest is not None and len(inputs[0]) > self._longest:
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

    def destroy(self, *, forget: bool = False) -> None:
        """Free all graphs. NCCL waits for this before it ends a communicator whose messages they hold.

        Shapes that have been called are captured by their next call; with `forget` by the one after it.
        """
        for captured in self._passes.values():
            if captured is not None:
                captured.graph.reset()
        self._passes = {} if forget else dict.fromkeys(self._passes)
        self._pool = None  # torch allows no capture into a pool that has had graphs and has none now

    def _captured(self, inputs: tuple[Tensor, ...]) -> CapturedPass:
        # Only one graph runs at a time, so they share their memory.
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph, inputs = torch.cuda.CUDAGraph(), tuple(x.clone() for x in inputs)
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = self._compute(*inputs)
        return CapturedPass(graph, inputs, output)


class TokenGraph:
    """Runs the pass that reads one token of every row as a graph, which is captured again when the caches have grown.

    Its inputs have the same shapes every time.
    """

    def __init__(self, rows: CachedRows, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
        """compute: from the tokens' embeddings [s, 1, h] and position ids to logits [s, 1, v / tp]."""
        self._rows, self._graphs = rows, PassGraphs(compute)
        self._key = (0, -1)
        """Columns and growths of the caches that the last pass has used."""

    def run(self, embeddings: Tensor, position_ids: Tensor) -> Tensor:
        """Return the logits, which the next call overwrites."""
        rows = self._rows
        # Never fewer columns than before, so that a long answer that ends needs no other graph.
        rows.num_columns = max(whole_pieces(rows.num_columns), self._key[0])
        if self._key != (rows.num_columns, rows.num_growths):
            self._graphs.destroy(forget=True)  # this pass allocates what is missing in the caches
        logits = self._graphs(embeddings, position_ids)
        self._key = (rows.num_columns, rows.num_growths)
        return logits

    def destroy(self) -> None:
        """Free the graph."""
        self._graphs.destroy(forget=True)


def has_tiles(model: VisionLanguageModel) -> bool:
    """Return whether a model's tower takes images of one size, all of them on this rank, and nothing else."""
    return isinstance(model.vision_model, VisionTransformer) and not model.divides_media


def tower_graphs(model: VisionLanguageModel) -> PassGraphs:
    """Let a tower that `has_tiles` run as graphs, until its attribute `forward` is deleted."""
    tower = model.vision_model
    graphs = PassGraphs(partial(tower.forward, media={}), MOST_TILES)
    vars(tower)["forward"] = lambda tiles, *_: graphs(tiles)
    return graphs
