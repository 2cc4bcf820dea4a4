"""The parameters of each pipeline stage on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llava_mcore.plan.layout import RunLayout
from llava_mcore.plan.sizes.model import Model


@dataclass(frozen=True)
class StageParameters:
    """Counts on one rank of a stage.

    `layers`: of the decoder's matrices alone, which FP8 and quantization concern. `experts`: of experts, whose replicas
    are others. `ends`: embedding and output layer.
    `tower`: with the connector. `adapter`: LoRA's matrices.
    """

    layers: float
    small: float
    ends: float
    tower: float
    connector: float
    adapter: float
    trained: float
    experts: float = 0.0
    trained_experts: float = 0.0
    """Part of `trained`."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.layers + self.experts + self.small + self.ends + self.tower + self.connector + self.adapter


def stage_parameters(model: Model, layout: RunLayout, stage: int) -> StageParameters:
    """Count the parameters of a stage on one of its ranks."""
    decoder, tp = model.decoder, layout.tp
    num_layers = layout.layers[stage]
    first, last = stage == 0, stage == layout.pp - 1
    rows = layout.padded_vocab(decoder.vocab) * decoder.hidden / tp
    # A tied output layer on another stage than the embedding has a copy of it.
    ends = rows * (int(first) + int(last and not (decoder.tied and layout.pp == 1)))
    layers = num_layers * decoder.layer_weights / tp
    experts = num_layers * decoder.expert_weights / (layout.ep * layout.etp)
    small = num_layers * (decoder.layer_parameters - decoder.layer_weights - decoder.expert_weights)
    small += decoder.hidden if last else 0
    tower = model.tower.parameters / (1 if layout.divides_images else tp) if first else 0.0
    connector = model.connector.parameters / tp if first else 0.0
    of_experts = _expert_adapters(model, layout, num_layers)
    adapter = _adapter_parameters(model, layout, num_layers, first=first) + of_experts
    trained = adapter
    share = float(layout.trains_language)
    if layout.trains_expanded:
        share = decoder.expanded / decoder.num_layers
    if not layout.adapter.is_on:
        trained += (layers + experts + small) * share + ends * (layout.trains_language and not layout.trains_expanded)
        trained += tower * layout.trains_tower + connector * layout.trains_projection
    of_experts += experts * (0.0 if layout.adapter.is_on else share)
    return StageParameters(layers, small, ends, tower, connector, adapter, trained, experts, of_experts)


def adapted_sizes(model: Model) -> Mapping[str, int]:
    """Return inputs + outputs of a decoder layer's linear layers, by the ends of their names in Hugging Face."""
    d = model.decoder
    keys = d.groups * d.head_dim
    return {
        "q_proj": d.hidden + d.queries * (2 if d.output_gate else 1),
        "k_proj": d.hidden + keys,
        "v_proj": d.hidden + keys,
        "o_proj": d.queries + d.hidden,
        "gate_proj": d.hidden + d.ffn,
        "up_proj": d.hidden + d.ffn,
        "down_proj": d.ffn + d.hidden,
    }


def _adapter_parameters(model: Model, layout: RunLayout, num_layers: int, *, first: bool) -> float:
    """Return the adapter's parameters on a rank. Tensor parallelism divides one matrix of each pair:
    the one on the divided side."""
    adapter, tower = layout.adapter, model.tower
    sizes = adapted_sizes(model)
    chosen = [x for name, x in sizes.items() if adapter.targets == ("all-linear",) or name in adapter.targets]
    count = num_layers * adapter.language * sum(chosen) * (0.5 + 0.5 / layout.tp)
    if first:
        of_layer = 8 * tower.hidden + (3 if tower.gated else 2) * (tower.hidden + tower.padded_ffn)
        count += adapter.vision * tower.num_layers * of_layer
        count += adapter.projection * sum(x.inputs + x.outputs for x in model.connector.products)
    return count


def owned_tables(layout: RunLayout, p: StageParameters) -> float:
    """Return how many of the same are in no linear layer: those of embeddings, the output layer, norms and biases. A
    tower's few are not counted."""
    if layout.adapter.is_on or layout.trains_expanded or not layout.trains_language:
        return 0.0
    return (p.ends + p.small) / (layout.shards if layout.distributed_optimizer else 1)


def _expert_adapters(model: Model, layout: RunLayout, num_layers: int) -> float:
    """Return the parameters of adapters on a rank's experts."""
    d, e = model.decoder, model.decoder.experts
    if e is None:
        return 0.0
    of_expert = layout.adapter.experts * (2 * d.hidden + 3 * e.ffn / layout.etp)
    return num_layers * d.sparse_share * e.count * of_expert / layout.ep


def owned(layout: RunLayout, p: StageParameters) -> float:
    """Return the trained parameters whose optimizer state a rank has."""
    if not layout.distributed_optimizer:
        return p.trained
    return (p.trained - p.trained_experts) / layout.shards + p.trained_experts / layout.expert_dp
