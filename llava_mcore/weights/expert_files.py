"""Experts of a mixture in files, in one of three forms, and on our side two stacked tensors per layer.

E: experts, h: hidden size, f: width inside an expert. On our side `linear_fc1` is [E, 2 * f, h], per expert first the
rows of the gate, then those of `up`, and `linear_fc2` is [E, h, f].
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from llava_mcore.weights.layouts import Copy, StackExperts, TensorTransform, TransposeExperts
from llava_mcore.weights.names import TextNames
from llava_mcore.weights.table import EXPERT_COLUMN, EXPERT_ROW, REPLICATED, Entry


class ExpertForm(Enum):
    """The form in which files store the experts of a layer.

    `PER_EXPERT`: `experts.{e}.gate_proj.weight`, `up_proj`, `down_proj`, a matrix each. `FUSED`:
    `experts.gate_up_proj` and `experts.down_proj` as on our side. `TRANSPOSED`: the same names, but [E, h, 2 * f] and
    [E, f, h].
    """

    PER_EXPERT = "per expert"
    FUSED = "fused"
    TRANSPOSED = "fused and transposed"


@dataclass(frozen=True)
class ExpertSizes:
    """The sizes of a layer's experts."""

    num_experts: int
    hidden: int
    inner: int


def expert_form(names: TextNames, layer: int, sizes: ExpertSizes, *, usual: ExpertForm) -> ExpertForm:
    """Return the form of the experts of a layer, from names and shapes of the folder's tensors.

    A tensor that is square within an expert does not show whether it is transposed: `gate_up_proj` if h = 2 * f,
    `down_proj` if h = f. It is never both, so the other one decides. Tensors of any other shape are named by the
    comparison of shapes that follows.
    """
    prefix = names.hf_layer.format(layer=layer) + "mlp."
    into, out = f"{prefix}experts.gate_up_proj", f"{prefix}experts.down_proj"
    if f"{prefix}experts.0.gate_proj.weight" in names.tensors:
        return ExpertForm.PER_EXPERT
    num_experts, h, f = sizes.num_experts, sizes.hidden, sizes.inner
    telling, transposed = (out, (num_experts, f, h)) if h == 2 * f else (into, (num_experts, h, 2 * f))
    if telling not in names.tensors:
        return usual
    return ExpertForm.TRANSPOSED if tuple(names.tensors[telling].shape) == transposed else ExpertForm.FUSED


def expert_entries(names: TextNames, sizes: ExpertSizes, form: ExpertForm) -> list[Entry]:
    """Return templates of a layer's router and experts."""
    m, h = names.megatron_layer + "mlp.", names.hf_layer + "mlp."
    into: tuple[str, ...] = (h + "experts.gate_up_proj",)
    out: tuple[str, ...] = (h + "experts.down_proj",)
    layouts: tuple[TensorTransform, TensorTransform] = (Copy(), Copy())
    if form is ExpertForm.TRANSPOSED:
        layouts = (TransposeExperts(), TransposeExperts())
    if form is ExpertForm.PER_EXPERT:
        experts = [f"{h}experts.{i}." for i in range(sizes.num_experts)]
        into = tuple(f"{expert}{x}_proj.weight" for expert in experts for x in ("gate", "up"))
        out = tuple(f"{expert}down_proj.weight" for expert in experts)
        layouts = (StackExperts(sizes.num_experts, 2), StackExperts(sizes.num_experts, 1))
    return [
        Entry(m + "router.weight", h + "gate.weight", REPLICATED),
        Entry(m + "experts.linear_fc1.weight", into, EXPERT_COLUMN, layouts[0]),
        Entry(m + "experts.linear_fc2.weight", out, EXPERT_ROW, layouts[1]),
    ]
