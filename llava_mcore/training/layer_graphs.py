"""CUDA graphs of the decoder's layers in packed training: the host starts one graph instead of hundreds of kernels.

A graph has fixed shapes. A pack has: its number of tokens is that of every pack, and the number of its samples is
rounded up to a power of two by empty ones, as cuDNN does anyway. What is needed and not captured yet runs without a
graph, and is captured before the next step.

s: tokens, b: rows (1), h: hidden size, d: rotated dims of a head.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.fp8_utils import get_fp8_recipe, is_first_last_bf16_layer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.nn import Parameter

from llava_mcore.adapters.attach import adapters_of
from llava_mcore.compat.graphs import make_graphs, new_pool, parameter_gathering
from llava_mcore.models.language.decoder import LanguageModel

logger = logging.getLogger(__name__)

# Layers of one graph. More of them copy and keep less between graphs; fewer let gradients be reduced earlier, which is
# of no use for the small gradients of adapters: all their layers are one graph.
LAYERS_OF_A_GRAPH = 4
# megatron-core's mark of parameters whose gradients the backward pass has already added to their sums.
_FUSED = "grad_added_to_main_grad"
# megatron-core's mark of layers whose weights may have changed since their last forward pass.
_FIRST = "is_first_microbatch"


class LayerGraphs:
    """Runs a decoder's layers as graphs while the model trains on packs, and as they are otherwise."""

    def __init__(self, model: LanguageModel, chunk: DistributedDataParallel, longest: int) -> None:
        """
        Args:
            model: in `chunk`, without recomputation and dropout, the whole of it on this rank.
            longest: largest length of a sample.
        """
        self._model, self._longest = model, longest
        self._gather = parameter_gathering(chunk)
        self._segments = [Segment(layers, longest) for layers in _segments(model)]
        self._graphs: dict[_Shape, list[Callable[..., Tensor]]] = {}
        self._seen: dict[_Shape, list[tuple[Tensor, ...]]] = {}
        self._pool = new_pool()
        self._bounds: tuple[PackedSeqParams, Tensor] | None = None
        self._table: Tensor | None = None
        for number, segment in enumerate(self._segments):
            for layer in segment.layers:
                vars(layer)["forward"] = partial(self._forward, number, layer)

    def capture(self) -> None:
        """Capture graphs of the shapes that have been seen without one; a collective call of tensor-parallel ranks.

        Call when no gradients are kept: sums of gradients are not defined afterwards.
        """
        for shape, samples in self._seen.items():
            logger.info("capturing CUDA graphs for %d tokens and up to %d packed samples", *shape)
            self._mark_fused()
            gc.collect()
            torch.cuda.empty_cache()
            config = self._model.config
            self._graphs[shape] = make_graphs(
                [Segment(segment.layers, self._longest) for segment in self._segments],
                [tuple(_copy(x) for x in sample) for sample in samples],
                fp8=[segment.in_fp8 for segment in self._segments],
                recipe=get_fp8_recipe(config) if config.fp8 else None,
                pool=self._pool,
            )
        self._seen.clear()

    def _mark_fused(self) -> None:
        """Remember whose gradients Transformer Engine adds up itself; it has told so in passes without a graph."""
        for segment in self._segments:
            trained = [p for p in segment.parameters() if p.requires_grad]
            segment.fused = [p for p in trained if vars(p)[_FUSED]]

    def _forward(
        self,
        number: int,
        layer: TransformerLayer,
        hidden_states: Tensor,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        rotary_pos_emb: Tensor | None = None,
        context: Tensor | None = None,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The forward pass of one layer: its segment's graph in the first one, then nothing; or the layer itself."""
        segment = self._segments[number]
        if layer is segment.layers[0]:
            segment.is_done = False
            if packed_seq_params is not None and layer.training and torch.is_grad_enabled():
                assert rotary_pos_emb is not None
                given = hidden_states, self._padded_bounds(packed_seq_params), self._angles(rotary_pos_emb)
                shape = _Shape(given[0].shape[0], given[1].shape[0] - 1)
                if shape in self._graphs:
                    segment.is_done = True
                    return self._replay(segment, self._graphs[shape][number], given), context
                kept = tuple(x.detach().requires_grad_(x.requires_grad) for x in given)
                self._seen.setdefault(shape, [()] * len(self._segments))[number] = kept
        if segment.is_done:
            return hidden_states, context
        own = type(layer).forward
        result: tuple[Tensor, Tensor | None] = own(
            layer,
            hidden_states,
            packed_seq_params=packed_seq_params,
            rotary_pos_emb=rotary_pos_emb,
            context=context,
            **more,
        )
        return result

    def _replay(self, segment: Segment, graph: Callable[..., Tensor], given: tuple[Tensor, ...]) -> Tensor:
        if self._gather is not None:
            for module in segment.modules():
                self._gather(module)
        for parameter in segment.fused:
            vars(parameter)[_FUSED] = True
        return graph(*given, is_first_microbatch=segment.use_weights())

    def _padded_bounds(self, params: PackedSeqParams) -> Tensor:
        """Return where samples begin, with empty ones up to a power of two, int32 [power + 1]."""
        if self._bounds is None or self._bounds[0] is not params:
            self._bounds = params, padded_bounds(params.cu_seqlens_q)
        return self._bounds[1]

    def _angles(self, given: Tensor) -> Tensor:
        """Return rotary angles of a fixed shape: [longest, 1, 1, d], the same every time, or as given for each token
        where positions have several axes."""
        if self._model.shape.rope.axes is not None:
            return given
        if self._table is None:
            self._table = self._model.rotary_pos_emb(self._longest)
        return self._table


@dataclass(frozen=True)
class _Shape:
    """What graphs differ in. num_samples: with the empty ones."""

    num_tokens: int
    num_samples: int

    def __iter__(self) -> Iterator[int]:
        return iter((self.num_tokens, self.num_samples))


def _copy(x: Tensor) -> Tensor:
    """Return memory of a graph's own for an argument, with its values."""
    return x.detach().clone().requires_grad_(x.requires_grad)


class Segment(nn.Module):
    """Layers that follow each other, with their adapters, as a function of tensors.

    `fused`: parameters whose gradients are added to their sums inside the passes. `is_done`: the graph has run in
    this pass.
    """

    def __init__(self, layers: Iterable[TransformerLayer], longest: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        adapters = [adapter for module in self.layers.modules() for adapter in adapters_of(module)]
        self.factors = nn.ModuleList(factors for adapter in adapters for factors in adapter.factors.values())
        self.longest = longest
        self.fused: list[Parameter] = []
        self.is_done = False

    @property
    def in_fp8(self) -> bool:
        """Whether the layers multiply in FP8."""
        first = self.layers[0]
        assert isinstance(first, TransformerLayer)
        return bool(first.config.fp8) and not is_first_last_bf16_layer(first.config, first.layer_number - 1)

    def use_weights(self) -> bool:
        """Return whether weights may have changed since the last pass, as megatron-core's schedules mark it."""
        marked = [vars(module) for module in self.modules() if _FIRST in vars(module)]
        is_first = any(marks[_FIRST] for marks in marked)
        for marks in marked:
            marks[_FIRST] = False
        return is_first

    def forward(self, hidden_states: Tensor, bounds: Tensor, angles: Tensor) -> Tensor:
        """Return [s, b, h] of [s, b, h], [s / tp, b, h] with sequence parallelism."""
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=self.longest,
            max_seqlen_kv=self.longest,
        )
        for layer in self.layers:
            own = type(layer).forward
            hidden_states, _ = own(
                layer, hidden_states, attention_mask=None, packed_seq_params=params, rotary_pos_emb=angles
            )
        return hidden_states


def padded_bounds(bounds: Tensor) -> Tensor:
    """Return the starts of packed samples, [n + 1], with empty samples at the end: n becomes a power of two."""
    num_samples = bounds.shape[0] - 1
    missing = (1 << (num_samples - 1).bit_length()) - num_samples
    return torch.cat([bounds, bounds[-1:].expand(missing)]) if missing else bounds


def _segments(model: LanguageModel) -> Iterator[list[TransformerLayer]]:
    """Yield layers that become one graph: neighbors, all in FP8 or none."""
    is_adapted = any(adapters_of(module) for module in model.decoder.modules())
    number = len(model.decoder.layers) if is_adapted else LAYERS_OF_A_GRAPH
    for _, found in groupby(
        model.decoder.layers, lambda layer: is_first_last_bf16_layer(model.config, layer.layer_number - 1)
    ):
        layers = list(found)
        for start in range(0, len(layers), number):
            yield layers[start : start + number]
