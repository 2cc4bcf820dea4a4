"""Parts that become one CUDA graph: consecutive layers, or attention and router of a layer whose experts other ranks
have too.

t: tokens or patches, h: hidden size.
"""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from collections.abc import Sequence

from megatron.core.fp8_utils import is_first_last_bf16_layer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.nn import Parameter

from llava_mcore.adapters.attach import adapters_of
from llava_mcore.compat.megatron.layers import after_mlp, attention_of, mlp_of, norm_before_mlp
from llava_mcore.models.language.experts import ExpertLayer, ExpertMatrices
from llava_mcore.models.language.layers import DeepstackLayer
from llava_mcore.training.graphs.packs import Packs

Outputs = Tensor | tuple[Tensor, ...]
"""Results of a graph."""

# megatron-core's mark of layers whose weights may have changed since their last forward pass.
_FIRST = "is_first_microbatch"


def segment_of(layers: Sequence[TransformerLayer], packs: Packs) -> LayerSegment:
    """Return layers as a segment. A layer whose shapes differ is one of its own: see `has_fixed_shapes`."""
    return LayerSegment(layers, packs) if has_fixed_shapes(layers[0]) else RoutingSegment(layers, packs)


def has_fixed_shapes(layer: TransformerLayer) -> bool:
    """Return whether a whole layer can be captured. If ranks send tokens to each other's experts, the number of tokens
    varies, and only attention and router have fixed shapes."""
    return not isinstance(layer.mlp, ExpertLayer) or layer.mlp.has_fixed_shapes


def factors_of(layers: nn.Module) -> nn.ModuleList:
    """Return the adapter factors of layers, which are not submodules of them."""
    adapters = [adapter for module in layers.modules() for adapter in adapters_of(module)]
    return nn.ModuleList(factors for adapter in adapters for factors in adapter.factors.values())


class LayerSegment(nn.Module):
    """Layers that follow each other, with their adapters, as a function of tensors.

    `fused`: parameters whose gradients are added to their sums inside the passes. `is_done`: the graph has run in
    this pass.
    """

    def __init__(self, layers: Sequence[TransformerLayer], packs: Packs) -> None:
        super().__init__()
        self.layers = tuple(layers)
        self.captured = self._captured()
        self.factors = factors_of(self.captured)
        self.packs = packs
        self.fused: list[Parameter] = []
        self.is_done = False

    def _captured(self) -> nn.ModuleList:
        """Return the modules that the graph computes."""
        return nn.ModuleList(self.layers)

    @property
    def in_fp8(self) -> bool:
        """Whether the layers compute in FP8."""
        first = self.layers[0]
        return bool(first.config.fp8) and not is_first_last_bf16_layer(first.config, first.layer_number - 1)

    def use_weights(self) -> bool:
        """Return whether weights may have changed since the last pass, as megatron-core's schedules mark it."""
        marked = [vars(module) for module in self.modules() if _FIRST in vars(module)]
        is_first = any(marks[_FIRST] for marks in marked)
        if is_first:
            for matrices in (module for module in self.modules() if isinstance(module, ExpertMatrices)):
                matrices.update_fp8()
        for marks in marked:
            marks[_FIRST] = False
        return is_first

    def finish(self, outputs: Outputs, packed: PackedSeqParams, padding_mask: Tensor | None) -> Tensor:
        """Return the layers' output from that of `forward`, with the routers' loss terms added.

        Args:
            packed: the arguments of the layers in this pass.
            padding_mask: likewise.
        """
        if isinstance(outputs, Tensor):
            return outputs
        hidden_states, *choices = outputs
        for mixture, choice in zip(self._mixtures(), zip(choices[::2], choices[1::2], strict=True), strict=True):
            hidden_states = mixture.add_terms(choice, hidden_states, padding_mask)
        return hidden_states

    def _mixtures(self) -> list[ExpertLayer]:
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, ExpertLayer)]

    def add_features(self, hidden_states: Tensor, context: Tensor | None) -> Tensor:
        """Return what `forward` returned with the features of the last layer, if it adds some."""
        last = self.layers[-1]
        return last.add_features(hidden_states, context) if isinstance(last, DeepstackLayer) else hidden_states

    def forward(self, *sample: Tensor) -> Outputs:
        """Return hidden states [t, 1, h], [t / tp, 1, h] with sequence parallelism, of a `Sample`; then logits and
        choice of each router."""
        routers, hidden_states = [mixture.router for mixture in self._mixtures()], sample[0]
        for router in routers:
            router.choices = []
        params, angles = self.packs.arguments(*sample)
        for layer in self.layers:
            class_forward = type(layer).forward
            hidden_states, _ = class_forward(
                layer, hidden_states, attention_mask=None, packed_seq_params=params, rotary_pos_emb=angles
            )
        choices = [x for router in routers for choice in router.choices for x in choice]
        for router in routers:
            router.choices = None
        return (hidden_states, *choices) if choices else hidden_states


class RoutingSegment(LayerSegment):
    """Attention and router of a layer with experts, their norms, and the residual connection of the attention. The
    router's terms and the experts follow without a graph.

    A router that chooses at random is not captured, as no graph draws random numbers.
    """

    def _captured(self) -> nn.ModuleList:
        layer, experts = self._layer()
        self.routes = not experts.config.moe_router_force_load_balancing
        more = [layer.pre_mlp_layernorm, experts.router] if self.routes else []
        return nn.ModuleList([layer.input_layernorm, layer.self_attention, *more])

    def _layer(self) -> tuple[TransformerLayer, ExpertLayer]:
        (layer,) = self.layers
        assert isinstance(layer.mlp, ExpertLayer)
        return layer, layer.mlp

    def finish(self, outputs: Outputs, packed: PackedSeqParams, padding_mask: Tensor | None) -> Tensor:
        """Return the layer's output from that of `forward`, with the experts' outputs added."""
        layer, experts = self._layer()
        if isinstance(outputs, Tensor):
            return mlp_of(layer, outputs, packed, padding_mask)
        hidden_states, normed, logits, probs, chosen = outputs
        return after_mlp(layer, experts.forward_chosen(normed, (logits, probs, chosen), padding_mask), hidden_states)

    def forward(self, *sample: Tensor) -> Outputs:
        """Return hidden states before the norm of the experts, shapes as of `LayerSegment`; these after that norm; and
        what the router's `choose` returns."""
        params, angles = self.packs.arguments(*sample)
        layer, experts = self._layer()
        hidden_states = attention_of(layer, sample[0], params, angles)
        if not self.routes:
            return hidden_states
        normed = norm_before_mlp(layer, hidden_states)
        return hidden_states, normed, *experts.router.choose(normed)
