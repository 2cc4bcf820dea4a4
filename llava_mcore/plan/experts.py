"""Mixtures of experts: the time of a layer's products and messages, and what its backward pass needs in memory.

Experts are chosen equally often. Each rank sends its tokens to the ranks with their experts, and gets them back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from llava_mcore.plan.layout import RunLayout
from llava_mcore.plan.sizes.model import Model
from llava_mcore.plan.work import Work

if TYPE_CHECKING:
    from llava_mcore.plan.seconds import Machine


class MixtureCost(NamedTuple):
    """A mixture's forward pass in a layer.

    products, messages: seconds. of_matrices: seconds of the products for the gradients of matrices, which experts never
    compute in FP8. moved: bytes. quantized: bytes; a third of those of both passes, since the backward pass counts
    twice.
    """

    products: float = 0.0
    of_matrices: float = 0.0
    messages: float = 0.0
    moved: float = 0.0
    quantized: float = 0.0


def mixture_of(model: Model, layout: RunLayout, work: Work, machine: Machine) -> MixtureCost:
    """Return what a layer's mixture computes, sends, moves and quantizes."""
    d, e, fp8 = model.decoder, model.decoder.experts, layout.fp8 != "none"
    if e is None:
        return MixtureCost()
    tokens = work.computed / (layout.tp if layout.sequence_parallel else 1)
    rows = tokens * layout.ep * layout.etp * e.chosen / e.count
    local, width = e.count / layout.ep, e.ffn / layout.etp
    grouped, in_bf16 = (
        local * (machine.grouped(rows, d.hidden, 2 * width, fp8=x) + machine.grouped(rows, width, d.hidden, fp8=x))
        for x in (fp8, False)
    )
    others = machine.product(tokens, d.hidden, e.count)  # the router, never in FP8
    if e.shared:
        shared = e.shared / layout.tp
        others += machine.product(work.computed, d.hidden, 2 * shared, fp8=fp8)
        others += machine.product(work.computed, shared, d.hidden, fp8=fp8)
    ranks = layout.ep * layout.etp
    across = layout.tp * layout.ep > machine.gpu.per_node
    messages = 2 * machine.collective(2 * tokens * e.chosen * d.hidden, ranks, across_nodes=across)
    moved = tokens * e.chosen * (16 * d.hidden + 6 * e.ffn)
    # Inputs of both matrices and gradients of their outputs, three bytes a value: read in bf16, written in FP8. A third
    # of that, since the forward pass counts it once and the backward pass twice.
    quantized = tokens * e.chosen * (2 * d.hidden + 3 * e.ffn)
    return MixtureCost(grouped + others, in_bf16 + others, messages, moved, quantized)


def expert_gradients(model: Model, layout: RunLayout, work: Work) -> float:
    """Return the bytes of a layer's backward pass beside its activations, at their peak: in the product of the first
    matrix, whose gradient is made before it is added to the sum of the step."""
    d, e = model.decoder, model.decoder.experts
    if e is None:
        return 0.0
    rows = work.computed / (layout.tp if layout.sequence_parallel else 1) * e.chosen
    width = e.ffn / layout.etp
    matrix = 4 * e.count / layout.ep * width * d.hidden * layout.trains_language
    return rows * (4 * width + 2 * d.hidden) + matrix


def graphed_experts(model: Model, layout: RunLayout) -> float:
    """Return the bytes that graphs of whole layers keep for experts: instead of gradients that have been added to the
    sum of the step, one tensor for each of the two shapes of their matrices (`models.language.grouped_products`)."""
    d, e = model.decoder, model.decoder.experts
    if e is None or not captures_experts(model, layout) or not layout.trains_language:
        return 0.0
    return 6.0 * e.count * e.ffn * d.hidden


def captures_experts(model: Model, layout: RunLayout) -> bool:
    """Return whether graphs hold experts: only where a rank has all of them are shapes fixed."""
    return layout.graphs and model.decoder.experts is not None and layout.ep * layout.etp == 1
