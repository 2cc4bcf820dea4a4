"""The pass that reads one token of every row, as a CUDA graph: the host launches all kernels with one call.

Such a pass reads all weights for a few tokens, which takes a GPU a few milliseconds. Launching its kernels one by one
takes the host ten times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from megatron.core.transformer.attention import Attention
from torch import Tensor

from llava_mcore.inference.generation.cache import CachedAttention
from llava_mcore.inference.generation.rows import CachedRows, whole_pieces
from llava_mcore.models.multimodal import VisionLanguageModel


def can_capture(models: Sequence[VisionLanguageModel], device: torch.device) -> bool:
    """Return whether passes of single tokens have fixed shapes and stay on one GPU or between tensor-parallel ones.

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


class TokenGraph:
    """Runs a pass as a graph of all its kernels, which is captured again when the caches have grown."""

    def __init__(self, rows: CachedRows, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
        """compute: from the tokens' embeddings [s, 1, h] and position ids to logits [s, 1, v / tp]; of these shapes
        every time."""
        self._rows, self._compute = rows, compute
        self._key = (0, -1)
        """Columns and growths of the caches that the graph, or the pass before its capture, has used."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, Tensor] | None = None
        self._logits: Tensor | None = None

    def run(self, embeddings: Tensor, position_ids: Tensor) -> Tensor:
        """Return the logits, which the next call overwrites."""
        rows = self._rows
        # Never fewer columns than before, so that a long answer that ends needs no other graph.
        rows.num_columns = max(whole_pieces(rows.num_columns), self._key[0])
        if self._key != (rows.num_columns, rows.num_growths):
            # This pass allocates what is missing in the caches, and loads kernels; both may not happen in a capture.
            self.destroy()
            logits = self._compute(embeddings, position_ids)
            self._key = (rows.num_columns, rows.num_growths)
            return logits
        if self._graph is None:
            self._capture(embeddings, position_ids)
        assert self._graph is not None and self._inputs is not None and self._logits is not None
        for buffer, value in zip(self._inputs, (embeddings, position_ids), strict=True):
            buffer.copy_(value)
        self._graph.replay()
        return self._logits

    def destroy(self) -> None:
        """Free the graph. NCCL waits for this before it ends a communicator whose messages the graph holds."""
        if self._graph is not None:
            self._graph.reset()
        self._graph = self._logits = None

    def _capture(self, embeddings: Tensor, position_ids: Tensor) -> None:
        self._inputs = embeddings.clone(), position_ids.clone()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._logits = self._compute(*self._inputs)
