"""What a built folder must pass, whatever it was built from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.parallel.groups import single_process
from tests.helpers.build_parts import tensors_of
from tests.helpers.cases import hf_logits, make_inputs
from tests.parallel.checks import load_model, logits


def assert_converts(folder: Path, model: Any, scratch: Path) -> None:
    """Import, compare logits with Hugging Face's `model` of the folder, export: every tensor comes back bitwise."""
    checkpoint = import_hf(folder, scratch / "megatron")
    inputs = make_inputs(model)
    with single_process() as groups:
        found = logits(groups, load_model(groups, checkpoint), inputs)
    assert found is not None
    expected = hf_logits(model, inputs)
    torch.testing.assert_close(found[..., : expected.shape[-1]], expected, rtol=0, atol=1e-5)
    assert_goes_back(folder, scratch / "megatron", scratch / "exported")


def assert_goes_back(folder: Path, megatron: Path, target: Path) -> None:
    """Export what was imported from a folder: every tensor comes back bitwise."""
    export_hf(megatron, target)
    before, after = tensors_of(folder, ""), tensors_of(target, "")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
