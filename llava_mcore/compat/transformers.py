"""transformers' modules under the names that checkpoint files have."""

from __future__ import annotations

import torch
from torch import Tensor

_DINOV2 = ("dinov2", "dinov2_with_registers")
_RENAMED = {
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
    "mlp.down_proj": "mlp.weights_out",
}
"""In DINOv2 since transformers 5.18, which goes on to read and write files with the old names."""
_GATE, _UP, _FUSED = "mlp.gate_proj", "mlp.up_proj", "mlp.weights_in"


def tower_names_in_files(outputs: dict[str, Tensor], prefix: str, tower: str) -> dict[str, Tensor]:
    """Return the outputs of a model's modules under the names of its tensors in files.

    Args:
        outputs: module name -> output [..., features].
        prefix: of the tower's modules; others keep their names.
        tower: the tower's model_type.
    """
    if tower not in _DINOV2:
        return outputs
    named = {_old_name(name) if name.startswith(prefix) else name: x for name, x in outputs.items()}
    for name in [x for x in named if x.startswith(prefix) and x.endswith(_GATE)]:
        layer = name.removesuffix(_GATE)
        named[layer + _FUSED] = torch.cat([named.pop(name), named.pop(layer + _UP)], dim=-1)
    return named


def _old_name(name: str) -> str:
    for new, old in _RENAMED.items():
        if name.endswith("." + new):
            return name.removesuffix(new) + old
    return name
