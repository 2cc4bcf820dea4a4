"""CUDA graphs of layers in packed training: the host starts one graph instead of hundreds of kernels.

A graph has fixed shapes (`packs.py`). A shape without a graph runs without one, and is captured before the next step.
Nothing else can use the memory of graphs, so such a pass computes its activations again.

t: tokens or patches, h: hidden size.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.fp8_utils import get_fp8_recipe
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from llava_mcore.compat.megatron.graphs import destroy_graphs, make_graphs, new_pool, parameter_gathering
from llava_mcore.models.language.experts import ExpertLayer
from llava_mcore.training.graphs.packs import Packs, Sample
from llava_mcore.training.graphs.segments import LayerSegment, Outputs, segment_of

logger = logging.getLogger(__name__)

# megatron-core's mark of parameters whose gradients the backward pass has already added to their sums.
_FUSED = "grad_added_to_main_grad"


class LayerGraphs:
    """Runs layers as graphs while the model trains on packs, and normally otherwise."""

    def __init__(
        self,
        segments: Iterable[Sequence[TransformerLayer]],
        config: TransformerConfig,
        chunk: DistributedDataParallel,
        packs: Packs,
    ) -> None:
        """
        Args:
            segments: layers that follow each other, without recomputation and dropout, each list to be one graph. Only
                after the last of a list may features be added.
            config: of the layers.
            chunk: the data-parallel wrapper of the whole model.
        """
        self._config, self._packs = config, packs
        self._gather = parameter_gathering(chunk)
        self._segments = [segment_of(layers, packs) for layers in segments]
        self._graphs: dict[tuple[int, ...], list[Callable[..., Outputs]]] = {}
        self._seen: dict[tuple[int, ...], list[Sample]] = {}
        self._without: set[tuple[int, ...]] = set()
        """Shapes that have no graphs and get none."""
        self._pass: tuple[PackedSeqParams, tuple[Tensor, ...]] | None = None
        """Arguments of all segments in the current pass, after the hidden states."""
        self._pool = new_pool()
        for index, segment in enumerate(self._segments):
            for layer in segment.layers:
                vars(layer)["forward"] = partial(self._forward, index, layer)

    def capture(self) -> None:
        """Capture graphs of the shapes that have been seen without one; a collective call of the ranks of a replica.

        Call when no gradients are kept: sums of gradients are not defined afterwards.
        """
        for seen in self._seen.values():
            for samples in self._packs.samples(seen):
                if _shape(samples[0]) not in self._graphs:
                    self._graphs[_shape(samples[0])] = self._captured(samples)
        self._without |= self._seen.keys() - self._graphs.keys()
        self._seen.clear()

    def close(self) -> None:
        """Destroy the graphs; call before the process groups end, which NCCL would otherwise wait for forever."""
        for graphs in self._graphs.values():
            destroy_graphs(graphs)
        self._graphs.clear()

    def _captured(self, samples: list[Sample]) -> list[Callable[..., Outputs]]:
        """Return the graphs of all segments for arguments of these shapes."""
        logger.info("capturing CUDA graphs for %s", self._packs.describe(samples[0]))
        self._mark_fused()
        gc.collect()
        torch.cuda.empty_cache()
        return make_graphs(
            [segment_of(segment.layers, self._packs) for segment in self._segments],
            samples,
            fp8=[segment.in_fp8 for segment in self._segments],
            recipe=get_fp8_recipe(self._config) if self._config.fp8 else None,
            pool=self._pool,
        )

    def _mark_fused(self) -> None:
        """Remember the parameters whose gradients Transformer Engine accumulates itself, as it marked them in passes
        without a graph."""
        for segment in self._segments:
            trained = [p for p in segment.parameters() if p.requires_grad]
            segment.fused = [p for p in trained if vars(p)[_FUSED]]

    def _forward(
        self,
        index: int,
        layer: TransformerLayer,
        hidden_states: Tensor,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        rotary_pos_emb: Tensor | None = None,
        context: Tensor | None = None,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The forward pass of one layer: its segment's graph in the first one, then nothing; or the layer itself."""
        segment = self._segments[index]
        # The first layer of a segment stands for all of them, if there is a graph of these shapes. New shapes are
        # remembered, to be captured before the next step.
        if layer is segment.layers[0]:
            segment.is_done = False
            if packed_seq_params is not None and layer.training and torch.is_grad_enabled():
                inputs = hidden_states, *self._tensors(hidden_states, packed_seq_params, rotary_pos_emb)
                shape = _shape(inputs)
                if shape in self._graphs:
                    segment.is_done = True
                    outputs = self._replay(segment, self._graphs[shape][index], inputs)
                    hidden_states = segment.finish(outputs, packed_seq_params, more.get("padding_mask"))
                    return segment.add_features(hidden_states, context), context
                if shape not in self._without:
                    sample = tuple(x.detach().requires_grad_(x.requires_grad) for x in inputs)
                    self._seen.setdefault(shape, [()] * len(self._segments))[index] = sample
        # Later layers of the segment were computed by its graph.
        if segment.is_done:
            return hidden_states, context
        # No graph: run the layer itself. There may be no room for its activations beside the memory of graphs, so they
        # are computed again; not those of experts, which would count their tokens twice.
        run = partial(
            type(layer).forward,
            layer,
            packed_seq_params=packed_seq_params,
            rotary_pos_emb=rotary_pos_emb,
            context=context,
            **more,
        )
        trains_beside_graphs = bool(self._graphs) and layer.training and torch.is_grad_enabled()
        recomputes = trains_beside_graphs and not isinstance(layer.mlp, ExpertLayer)
        result: tuple[Tensor, Tensor | None] = (
            self._recomputed(run, hidden_states) if recomputes else run(hidden_states)
        )
        return result

    def _recomputed(self, run: Callable[[Tensor], Any], hidden_states: Tensor) -> Any:
        """Return a layer's result, keeping only its input for the backward pass."""
        if self._config.fp8:
            from transformer_engine.pytorch import checkpoint as engine_checkpoint  # keeps scales as they are

            return engine_checkpoint(run, hidden_states, use_reentrant=False)
        return checkpoint(run, hidden_states, use_reentrant=False, preserve_rng_state=False)

    def _tensors(self, hidden_states: Tensor, packed: PackedSeqParams, angles: Tensor | None) -> tuple[Tensor, ...]:
        """As `Packs.tensors`, once for all segments of a pass."""
        if self._pass is None or self._pass[0] is not packed:
            self._pass = packed, self._packs.tensors(hidden_states.shape[0], packed, angles)
        return self._pass[1]

    def _replay(self, segment: LayerSegment, graph: Callable[..., Outputs], inputs: Sample) -> Outputs:
        if self._gather is not None:
            for module in segment.modules():
                self._gather(module)
        for parameter in segment.fused:
            vars(parameter)[_FUSED] = True
        return graph(*inputs, is_first_microbatch=segment.use_weights())


def _shape(sample: Sample) -> tuple[int, ...]:
    return tuple(x.shape[0] for x in sample)
