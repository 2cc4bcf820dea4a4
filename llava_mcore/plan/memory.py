"""The peak memory of each pipeline stage on one GPU, by what takes it.

Activations are counted tensor by tensor, as Transformer Engine's layers save them for the backward pass. The sum is
what torch reserves; `outside` is what CUDA and NCCL take beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from llava_mcore.plan.context import buffers
from llava_mcore.plan.experts import captures_experts, expert_gradients, graphed_experts
from llava_mcore.plan.hardware.efficiency import Efficiency
from llava_mcore.plan.layout import RunLayout
from llava_mcore.plan.parameters import StageParameters, owned, owned_tables, stage_parameters
from llava_mcore.plan.sizes.model import Model, Tower
from llava_mcore.plan.work import PackWork, Work

NF4_BYTES = 4.127 / 8
"""A weight in 4 bits with its share of the scales, which are quantized too (QLoRA, Dettmers et al. 2023, section 3)."""
FP8_BYTES = 1 + 4 / 128
CHUNK = 2048
"""Tokens of a chunk of the output layer (`models.loss.linear_cross_entropy`)."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one GPU of a stage."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    tower_activations: float
    output_layer: float
    temporary: float
    pixels: float
    graphs: float
    allowance: float
    outside: float

    @property
    def reserved(self) -> float:
        """Bytes that torch has reserved at the peak."""
        return sum(vars(self).values()) - self.outside

    @property
    def total(self) -> float:
        """Bytes that the GPU must have."""
        return self.reserved + self.outside


def stage_memory(model: Model, layout: RunLayout, packs: PackWork, stage: int, fit: Efficiency) -> StageMemory:
    """Predict the peak of a stage: that of the micro-batch that takes most."""
    peaks = {packs.peaks[0], packs.peaks[1]} if stage in (0, layout.pp - 1) else {packs.peaks[0]}
    both = [_with_peak(model, layout, packs, peak, stage, fit) for peak in peaks]
    return max(both, key=lambda x: x.total)


def _with_peak(
    model: Model, layout: RunLayout, packs: PackWork, pack: Work, stage: int, fit: Efficiency
) -> StageMemory:
    """Return what a micro-batch takes whose packs differ from the mean as one of `pack` and others would."""
    parameters = stage_parameters(model, layout, stage)
    size = layout.micro_batch_size
    work = packs.mean.times(size - size**0.5) + pack.times(size**0.5)
    last, first = stage == layout.pp - 1, stage == 0
    in_flight = layout.in_flight(stage)
    stored = in_flight * decoder_activations(model, layout, work, layout.layers[stage], stage)
    tower = in_flight * tower_activations(model, layout, work) if first else 0.0
    # The output layer is done before the first layer's backward pass begins.
    output, temporary = output_layer(model, layout, work) if last else 0.0, _temporary(model, layout, work)
    apart = captures_experts(model, layout)  # the memory of graphs is not used for anything else
    pixels = _pixels(work, in_flight) if first else 0.0
    graphs = _graphs(model, layout, work, parameters, fit) if layout.graphs else 0.0
    parts = {
        "weights": _weights(layout, parameters),
        "gradients": _gradients(layout, parameters),
        "optimizer": _state(layout, parameters),
        "activations": stored,
        "tower_activations": tower,
        "output_layer": output if apart or output > temporary else 0.0,
        "temporary": temporary if apart or temporary >= output else 0.0,
        "pixels": pixels,
        "graphs": graphs,
    }
    return StageMemory(**parts, allowance=fit.fragmentation * sum(parts.values()), outside=fit.outside(layout))


def _state(layout: RunLayout, p: StageParameters) -> float:
    """Return the bytes of the optimizer's state."""
    tables = owned_tables(layout, p)
    return layout.state_bytes * tables + layout.matrix_state_bytes * (owned(layout, p) - tables)


def _weights(layout: RunLayout, p: StageParameters) -> float:
    """Return the bytes of weights, in FP8 with the copies that the products read."""
    matrices = {
        "none": float(layout.weight_bytes),
        "nf4": NF4_BYTES,
        "fp8": 2.0 if layout.fp8 != "none" else FP8_BYTES,  # with FP8 products both orders of a matrix
    }[layout.adapter.quantize]
    copies = 2.0 if layout.fp8 != "none" and layout.adapter.quantize == "none" else 0.0
    rest = p.total - p.layers - p.experts
    if layout.fsdp == "optim_grads_params":
        # The shards; what is outside of layers, whole; and the layers that run, or are gathered ahead.
        outside = p.ends + p.connector + p.adapter
        gathered = outside + _LAYERS_GATHERED * _largest_layer(layout, p)
        shards = (p.total - p.experts) / layout.shards + p.experts / layout.expert_dp
        return layout.weight_bytes * (shards + gathered)
    of_decoder = (matrices + copies) * (p.layers + p.experts)
    return of_decoder + layout.weight_bytes * rest + 2.0 * p.tower * layout.fp8_vision


_LAYERS_GATHERED = 2
"""Layers whose weights, or gradients, are whole at a time with --fsdp."""


def _largest_layer(layout: RunLayout, p: StageParameters) -> float:
    """Return the parameters of a decoder layer, which is larger than one of a tower."""
    return (p.layers + p.experts + p.small) / max(layout.layers)


def _gradients(layout: RunLayout, p: StageParameters) -> float:
    """Return the bytes of gradients, which are summed in fp32."""
    if layout.fsdp not in ("optim_grads", "optim_grads_params"):
        return 4.0 * p.trained
    unreduced = _LAYERS_GATHERED * _largest_layer(layout, p) * layout.trains_language * (not layout.adapter.is_on)
    return 4.0 * (owned(layout, p) + unreduced)


def layer_bytes(model: Model, layout: RunLayout) -> float:
    """Return what the backward pass of a decoder layer needs, in bytes per token, without recomputation.

    Inputs of the two norms and what these return; queries, keys and values; what attention returns; the first matrix's
    output and, unless everything is frozen, that of the activation function.
    """
    d, tp = model.decoder, layout.tp
    outside = tp if layout.sequence_parallel else 1
    fp8 = layout.fp8 != "none"
    norms = (4 * d.hidden + (2 if fp8 else 4) * d.hidden) * d.num_norms / 2
    attention = 2.0 * (d.qkv + d.queries) + (d.queries if fp8 else 0)
    if d.head_norms:
        attention += 2 * (d.qkv - d.groups * d.head_dim)
    delta = 2 * (3 * d.delta_in + 2 * d.delta_out)  # before and after the convolution, gates, and the net's output
    attention += d.delta_share * (delta - attention)
    mlp = (4.0 + (0 if layout.adapter.is_on else 1 if fp8 else 2)) * d.ffn
    dense = 1 - d.sparse_share
    again = layout.recompute == "selective" and "mlp" in layout.recompute_modules
    if again:
        norms, mlp = norms - 2 * d.hidden * dense, 0.0
    mlp *= dense
    if d.experts is not None:
        # Tokens in the order of experts; inside these; the router's numbers. What they return is not needed.
        e = d.experts
        inside = 0 if again else 6 * e.ffn
        mlp += d.sparse_share * (e.chosen * (2 * d.hidden + inside) + 6 * e.shared + 12 * e.count)
    if layout.recompute == "selective" and "core_attn" in layout.recompute_modules:
        attention -= 2 * d.queries
    lora = 14 * layout.adapter.language
    return (norms / outside + (attention + mlp) / tp + lora) * layout.weight_bytes / 2


def decoder_activations(model: Model, layout: RunLayout, work: Work, num_layers: int, stage: int) -> float:
    """Return the activations of a micro-batch on a stage."""
    full = layer_bytes(model, layout)
    outside = layout.tp if layout.sequence_parallel else 1
    layer_input = layout.weight_bytes * model.decoder.hidden / outside
    if layout.recompute != "full":
        per_token = num_layers * full
    elif layout.recompute_block is not None:
        recomputed = min(layout.recompute_block, num_layers)
        per_token = recomputed * layer_input + (num_layers - recomputed) * full
    else:
        per_token = -(-num_layers // layout.recompute_unit) * layer_input
    ends = (
        2 * layer_input if stage in (0, layout.pp - 1) else layer_input
    )  # embeddings or the last norm; what comes from the left
    return work.computed * (per_token + ends)


def tower_activations(model: Model, layout: RunLayout, work: Work) -> float:
    """Return the activations of a trained tower, and those of the connector."""
    t, tp = model.tower, 1 if layout.divides_images else layout.tp
    connector = sum(
        2 * (x.inputs + x.outputs) * x.share * (work.positions if x.per == "position" else work.num_items)
        for x in model.connector.products
    ) * (layout.trains_projection or layout.trains_tower or layout.adapter.is_on)
    if not (layout.trains_tower or layout.adapter.vision):
        return connector
    mlp = (6 if t.gated else 4) * t.padded_ffn
    per_layer = 8 * t.hidden + (8 * t.hidden + mlp) / tp
    if layout.fp8_vision:
        per_layer -= 2 * t.hidden + (t.padded_ffn - t.hidden) / tp
    padding = head_padding(t) / tp
    full_layers = t.num_layers if t.full_layers is None else t.full_layers
    layers = t.num_layers * (2 * t.hidden if layout.recompute_vision else per_layer)
    layers += 0 if layout.recompute_vision else full_layers * padding
    peak = per_layer + padding if layout.recompute_vision else 0
    return connector + work.local_positions * (layers + peak)


def head_padding(t: Tower) -> float:
    """Return the additional bytes per patch that a layer keeps if FlashAttention 4 computes its attention
    (models/vision/attention.py).

    Queries, keys, values and the output have zeros at the end of heads, and the output is kept without them too.
    """
    size = t.hidden // t.heads
    if t.positions or size in _HEAD_SIZES_OF_CUDNN or size > max(_HEAD_SIZES_OF_CUDNN):
        return 0.0
    padded = -(-size // _HEAD_MULTIPLE) * _HEAD_MULTIPLE
    return (8 * (padded / size - 1) + 2) * t.hidden if padded > size else 0.0


_HEAD_SIZES_OF_CUDNN, _HEAD_MULTIPLE = (64, 128), 32
"""Heads of other sizes are padded to the multiple, up to the largest."""


def output_layer(model: Model, layout: RunLayout, work: Work) -> float:
    """Return the bytes of the output layer and its loss in chunks (benchmarks/formulas.md)."""
    h, rows = model.decoder.hidden, layout.padded_vocab(model.decoder.vocab) / layout.tp
    tokens = work.trained
    is_trained = layout.trains_language and not layout.trains_expanded
    trained = 4 * rows * h if is_trained else 0
    chunk = 4 * min(CHUNK, tokens) * rows
    return trained + 2 * tokens * h + max(chunk * 1.5, (2 * rows * h if is_trained else 0) + 2 * tokens * h)


def _temporary(model: Model, layout: RunLayout, work: Work) -> float:
    """Return what the backward pass of a layer needs beside its activations: gradients inside it, and of a matrix."""
    d = model.decoder
    gradients = work.computed * (6 * d.ffn / layout.tp + 4 * d.hidden) + expert_gradients(model, layout, work)
    matrix = 2 * 2 * d.hidden * d.ffn / layout.tp
    again = (
        layout.recompute_unit * layer_bytes(model, replace(layout, recompute="none"))
        if layout.recompute != "none"
        else 0.0
    )
    restored = matrix if layout.adapter.quantize != "none" and layout.fp8 == "none" else 0.0
    beside = restored + buffers(model, layout, work)
    return gradients + matrix * layout.trains_language + work.computed * again + beside


def _pixels(work: Work, in_flight: float) -> float:
    """Return the images of the micro-batches in flight as bytes, and those of one as normalized numbers."""
    return work.pixel_bytes * in_flight + 4 * work.pixel_bytes


def _graphs(model: Model, layout: RunLayout, work: Work, p: StageParameters, fit: Efficiency) -> float:
    """Return what CUDA graphs keep apart: inputs and results of each, and gradients of its matrices."""
    tensors = 2.0 * work.computed * model.decoder.hidden * sum(layout.layers)
    grads = 2.0 * p.layers * layout.trains_language
    total = fit.graph_tensors * tensors + fit.graph_gradients * grads + graphed_experts(model, layout)
    if layout.graphs_vision and layout.trains_tower:
        tower = tower_activations(model, layout, work)
        total += fit.graph_tower * tower
    return total
