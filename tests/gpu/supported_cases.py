"""The cases that the packages of a machine with GPUs can run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llava_mcore.compat.delta_rule import has_fla, triton_without_gradients
from tests.helpers.cases import Case

DELTA_NETS = "qwen3_5"
"""Beginning of the architectures that have gated delta nets."""


def supported(cases: Sequence[Case], *, gradients: bool = False, pp: int = 1) -> list[Case]:
    """Return the cases without those whose kernels, or with `gradients` their backward pass, are missing here, and
    without a decoder that attends to images if there are stages."""
    if pp > 1:
        cases = [case for case in cases if case.architecture != "mllama"]
    if has_fla() and not (gradients and triton_without_gradients({torch.cuda.get_device_capability()})):
        return list(cases)
    left = [case for case in cases if not case.architecture.startswith(DELTA_NETS)]
    print("left out, since flash-linear-attention cannot run them:", [case.name for case in cases if case not in left])
    return left
