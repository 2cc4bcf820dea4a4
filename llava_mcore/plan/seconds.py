"""The time of a stage's forward and backward pass for one micro-batch, by what takes it.

Matrix products count FLOPs against the peak, with an efficiency that falls with the shortest dimension. What is no
product counts bytes against the memory's bandwidth. Where the host needs longer to start a layer's kernels than the GPU
to run them, the host's time counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from llava_mcore.plan.context import exposed_messages
from llava_mcore.plan.experts import mixture_of
from llava_mcore.plan.hardware.efficiency import Efficiency
from llava_mcore.plan.hardware.gpus import Gpu
from llava_mcore.plan.layout import RunLayout
from llava_mcore.plan.parameters import adapted_sizes
from llava_mcore.plan.sizes.model import Model
from llava_mcore.plan.work import Work


@dataclass(frozen=True)
class Machine:
    """A kind of GPU and the efficiencies on it."""

    gpu: Gpu
    fit: Efficiency

    def product(self, rows: float, inputs: float, outputs: float, *, fp8: bool = False) -> float:
        """Return the seconds of a product of [rows, inputs] and [inputs, outputs]."""
        peak = self.gpu.fp8 if fp8 and self.gpu.fp8 else self.gpu.bf16
        largest, half = (
            (self.fit.products_fp8, self.fit.half_size_fp8) if fp8 else (self.fit.products, self.fit.half_size)
        )
        shortest = min(rows, inputs, outputs)
        if shortest <= 0:
            return 0.0
        return 2 * rows * inputs * outputs / (peak * largest * shortest / (shortest + half))

    def grouped(self, rows: float, inputs: float, outputs: float, *, fp8: bool) -> float:
        """Return the seconds of an expert's part of a grouped product."""
        return self.product(rows, inputs, outputs, fp8=fp8) / (self.fit.grouped_fp8 if fp8 and self.gpu.fp8 else 1.0)

    def attention(self, flops: float, length: float) -> float:
        """Return the seconds of attention whose products take so many FLOPs. `length`: of the samples."""
        return flops / (self.gpu.bf16 * self.fit.attention * length / (length + self.fit.half_length)) if flops else 0.0

    def moved(self, num_bytes: float) -> float:
        """Return the seconds in which memory is read and written."""
        return num_bytes / (self.gpu.bandwidth * self.fit.memory)

    def collective(self, num_bytes: float, ranks: int, *, across_nodes: bool = False) -> float:
        """Return the seconds of gathering num_bytes from `ranks`, or of reducing and scattering as many."""
        if ranks == 1:
            return 0.0
        link = self.gpu.network if across_nodes else self.gpu.link
        return num_bytes * (ranks - 1) / ranks / (link * self.fit.link) + 1e-5


@dataclass(frozen=True)
class Pass:
    """Seconds of a stage's forward and backward pass for a micro-batch, by part.

    `layers`: products of decoder layers; `other`: what is no product; `host`: by how much the host takes longer.
    """

    layers: float = 0.0
    attention: float = 0.0
    other: float = 0.0
    tower: float = 0.0
    output: float = 0.0
    messages: float = 0.0
    gradients: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return sum(vars(self).values())

    def __add__(self, more: Pass) -> Pass:
        pairs = zip(vars(self).values(), vars(more).values(), strict=True)
        return Pass(*(a + b for a, b in pairs))

    def times(self, factor: float) -> Pass:
        """Return the same of so many."""
        return Pass(*(factor * x for x in vars(self).values()))


def flows_below(layout: RunLayout, part: str) -> bool:
    """Return whether gradients must pass through a part to something that is trained below it."""
    tower = layout.trains_tower or layout.adapter.vision > 0
    return tower if part == "projection" else tower or layout.trains_projection or layout.adapter.projection > 0


def stage_passes(model: Model, layout: RunLayout, work: Work, stage: int, machine: Machine) -> tuple[Pass, Pass]:
    """Return the forward and the backward pass of a stage."""
    layers = layout.layers[stage]
    forward, backward = _decoder_layer(model, layout, work, machine, is_first=stage == 0)
    forward, backward = forward.times(layers), backward.times(layers)
    if stage == 0:
        tower = _tower(model, layout, work, machine)
        forward, backward = forward + tower[0], backward + tower[1]
    if stage == layout.pp - 1:
        # Both passes of the output layer happen in the forward pass, because the loss mask is known.
        forward += _output(model, layout, work, machine)
    host = host_passes(model, layout, stage, machine.fit)
    if layout.ep * layout.etp > 1:
        # The host waits in every layer for the numbers of tokens that are exchanged: it cannot run ahead.
        waits = layers * model.decoder.sparse_share * host_layer(model, layout, machine.fit) / 3
        return forward + Pass(host=waits), _at_least(backward, host[1])
    return _at_least(forward, host[0]), _at_least(backward, host[1])


def host_passes(model: Model, layout: RunLayout, stage: int, fit: Efficiency) -> tuple[float, float]:
    """Return the time in which the host starts the kernels of both passes: it runs ahead of the GPU inside a pass."""
    decoder = layout.layers[stage] * host_layer(model, layout, fit)
    forward, backward = decoder / 3, decoder * 2 / 3
    if layout.recompute == "full":
        backward += forward
    elif layout.recompute == "selective" and "mlp" in layout.recompute_modules:
        backward += layout.layers[stage] * fit.host_layer * fit.host_experts * model.decoder.sparse_share / 3
    if stage == 0:
        tower = model.tower.num_layers * fit.host_tower * (fit.host_graph if layout.graphs_vision else 1.0)
        forward += tower / 3
        backward += tower * 2 / 3 * (layout.trains_tower or layout.adapter.vision > 0)
    return forward, backward


def host_layer(model: Model, layout: RunLayout, fit: Efficiency) -> float:
    """Return the time in which the host starts the kernels of a layer in both passes; the mean of the layers."""
    dense = fit.host_graph if layout.graphs else 1.0 + fit.host_fp8 * (layout.fp8 != "none")
    dense *= 1.0 + (fit.host_lora if layout.adapter.language and not layout.graphs else 0.0)
    dense *= 1.0 + (fit.host_tp if layout.tp > 1 and not layout.graphs else 0.0)
    return fit.host_layer * (dense + fit.host_experts * model.decoder.sparse_share)


def _decoder_layer(
    model: Model, layout: RunLayout, work: Work, machine: Machine, *, is_first: bool
) -> tuple[Pass, Pass]:
    """Return both passes of one layer."""
    d, tp, tokens, fp8 = model.decoder, layout.tp, work.computed, layout.fp8 != "none"
    trained, lora = layout.trains_language, layout.adapter.language
    flows = trained or lora > 0 or layout.adapter.experts > 0 or flows_below(layout, "language")

    # Products.
    def product(inputs: float, outputs: float) -> float:
        return machine.product(tokens, inputs, outputs, fp8=fp8)

    mlp = product(d.hidden, 2 * d.ffn / tp) + product(d.ffn / tp, d.hidden)
    mixture = mixture_of(model, layout, work, machine)
    mlp += d.sparse_share * (mixture.products - mlp)
    mixer = product(d.hidden, d.qkv / tp) + product(d.queries / tp, d.hidden)
    delta = product(d.hidden, d.delta_in / tp) + product(d.delta_out / tp, d.hidden) if d.delta_layers else 0.0
    products = mlp + mixer + d.delta_share * (delta - mixer)
    extra = sum(adapted_sizes(model).values()) * lora * 2 * tokens / (machine.gpu.bf16 * machine.fit.lora) / tp
    # Attention, and the state of delta nets.
    length = 2 * work.causal_pairs / max(1.0, work.tokens)
    share = 1 - d.delta_share
    scores = machine.attention(4 * work.causal_pairs * d.queries / tp * share, length)
    scores += machine.attention(6 * tokens * d.delta_state / tp * d.delta_share, 64) * 2
    # Norms and residuals, rotation, activation, quantizing: bytes that are read and written.
    outside = tp if layout.sequence_parallel else 1
    inside = (4 * d.qkv + 6 * d.ffn * (1 - d.sparse_share)) / tp
    moved = machine.fit.moved * tokens * (d.num_norms * 10 * d.hidden / outside + inside)
    moved += d.sparse_share * mixture.moved
    quantizing = tokens * (6 * d.hidden + 3 * (d.queries + d.ffn) / tp) + d.sparse_share * mixture.quantized
    quantizing *= machine.fit.quantizing * fp8
    restoring = _restoring(model, layout, machine)
    messages = 2 * machine.collective(2 * 2 * tokens * d.hidden, tp, across_nodes=tp > machine.gpu.per_node)
    messages *= machine.fit.tp_overlap if layout.tp_comm_overlap else 1.0
    messages += d.sparse_share * mixture.messages
    waits = exposed_messages(model, layout, work, machine, scores)
    # With sequence parallelism the backward pass gathers the inputs of two matrices again.
    again = 1.25 if layout.sequence_parallel else 1.0
    forward = Pass(
        layers=products + extra,
        attention=scores,
        other=machine.moved(moved + quantizing) + restoring,
        messages=messages + waits[0],
    )
    of_matrices = products + d.sparse_share * (mixture.of_matrices - mixture.products)
    accumulated = 12 * (d.layer_weights / tp + d.expert_weights / (layout.ep * layout.etp)) * trained
    backward = Pass(
        layers=of_matrices * float(trained) + products * float(flows) + 2 * extra,
        attention=2.5 * scores * flows,
        other=(machine.moved(2 * moved + 2 * quantizing) + restoring) * flows,
        messages=(messages * again + waits[1]) * flows,
        gradients=machine.moved(accumulated),
    )
    backward += _recomputed(model, layout, forward)
    return forward, backward


def _recomputed(model: Model, layout: RunLayout, forward: Pass) -> Pass:
    """Return the part of a forward pass that the backward pass repeats."""
    if layout.recompute == "full":
        block = layout.recompute_block
        share = 1.0 if block is None else min(1.0, block / max(layout.layers))
        return forward.times(share)
    if layout.recompute == "selective" and "mlp" in layout.recompute_modules:
        d, e = model.decoder, model.decoder.experts
        again = forward.layers * d.recomputed_weights / (d.layer_weights + d.chosen_weights)
        moved = 0.5 * (1 - d.sparse_share)
        if e is not None:  # what the experts' products move, not what is sent
            moved += d.sparse_share * 6 * e.ffn / (16 * d.hidden + 6 * e.ffn)
        return Pass(layers=again, other=forward.other * moved)
    return Pass()


def _at_least(computed: Pass, host: float) -> Pass:
    return computed + Pass(host=max(0.0, host - computed.total))


def _restoring(model: Model, layout: RunLayout, machine: Machine) -> float:
    """Return the time in which frozen matrices are restored from 4 or 8 bits, for each pass."""
    if layout.adapter.quantize == "none" or layout.fp8 != "none":
        return 0.0
    weights = model.decoder.layer_weights / layout.tp + model.decoder.expert_weights / layout.ep
    return machine.moved(weights * (0.6 + 2) * 2 if layout.adapter.quantize == "nf4" else weights * (1 + 2) * 1.5)


def _tower(model: Model, layout: RunLayout, work: Work, machine: Machine) -> tuple[Pass, Pass]:
    """Return both passes of tower and connector."""
    t, tp = model.tower, 1 if layout.divides_images else layout.tp
    positions = work.local_positions
    share = positions / max(1.0, work.positions)
    trained = layout.trains_tower
    flows = trained or layout.adapter.vision > 0
    fp8 = layout.fp8_vision

    def product(inputs: float, outputs: float) -> float:
        return machine.product(positions, inputs, outputs, fp8=fp8)

    w, f = t.hidden, t.padded_ffn
    products = product(w, 3 * w / tp) + product(w / tp, w)
    products += product(w, (2 if t.gated else 1) * f / tp) + product(f / tp, w)
    full = t.num_layers if t.full_layers is None else t.full_layers
    rest = t.num_layers - full
    length = work.pairs / max(1.0, work.positions)
    window = work.window_pairs / max(1.0, work.positions)
    computed = t.heads * (64 if t.head_dim <= 64 else 128)  # the kernels' heads have 64 or 128 columns
    scores = machine.attention(4 * work.pairs * share * computed / tp, length) * full
    scores += machine.attention(4 * work.window_pairs * share * computed / tp, max(16.0, window)) * rest
    moved = (
        machine.moved(positions * (24 * w + (12 * w + (6 if t.gated else 5) * f) / tp))
        * t.num_layers
        * machine.fit.tower_moved
    )
    messages = 2 * machine.collective(4 * positions * w, tp) * t.num_layers
    # Features of the images of other ranks, once; of their gradients context-parallel ranks have shares of a sum.
    gathered = machine.collective(2 * work.positions * w, layout.tower_ranks)
    summed = machine.collective(2 * work.positions * w, layout.cp) if layout.divides_images else 0.0
    embedding = machine.product(positions, t.patch_values, t.embedding / t.patch_values)
    connector = sum(
        machine.product((work.positions if x.per == "position" else work.num_items) * x.share, x.inputs, x.outputs / tp)
        for x in model.connector.products
    )
    forward = products * t.num_layers + scores + moved + messages + embedding + gathered
    accumulated = machine.moved(12 * t.parameters / tp) * trained
    backward = (products * t.num_layers * (float(trained) + 1) + 2.5 * scores + 2 * moved + messages + summed) * flows
    backward += embedding * trained + accumulated
    if layout.recompute_vision:
        backward += forward
    below = flows_below(layout, "projection")
    trains = layout.trains_projection
    return Pass(tower=forward + connector), Pass(tower=backward + connector * (float(trains) + float(below)))


def _output(model: Model, layout: RunLayout, work: Work, machine: Machine) -> Pass:
    """Return the output layer with its loss, both passes of it: three products, and fp32 logits twice."""
    d, tp = model.decoder, layout.tp
    rows = layout.padded_vocab(d.vocab) / tp
    tokens = work.trained
    flows = layout.trains_language or layout.adapter.is_on or flows_below(layout, "language")
    products = machine.product(min(tokens, 2048.0), d.hidden, rows) * max(1.0, tokens / 2048)
    is_trained = layout.trains_language and not layout.trains_expanded
    moved = machine.moved(tokens * rows * 20 + (12 * rows * d.hidden if is_trained else 0))
    messages = machine.collective(2 * tokens * d.hidden, tp) * 2
    return Pass(output=products * (1 + float(flows) + float(is_trained)) + moved, messages=messages)
