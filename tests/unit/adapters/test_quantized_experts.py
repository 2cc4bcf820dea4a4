"""QLoRA where experts are quantized too: what bitsandbytes makes of each expert's matrix, whoever divides them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes import functional
from peft import PeftModel
from torch import Tensor

from llava_mcore.adapters.linear_layers import model_layers
from llava_mcore.adapters.quantize_model import quantize_experts
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.models.architectures.hf_config import load_hf_config
from tests.helpers.cases import make_inputs
from tests.helpers.peft_models import open_hf, open_hf_in_4_bits
from tests.helpers.tiny_hf import make_hf_llava
from tests.unit.adapters.test_adapter_classes import check, everywhere


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices have whole blocks in a row."""
    root = tmp_path_factory.mktemp("quantized-experts")
    sizes = {"moe_intermediate_size": 128, "num_hidden_layers": 2}
    make_hf_llava(root / "hf", text="qwen3_moe", text_overrides=sizes)
    import_hf(root / "hf", root / "megatron")
    return root


def by_bitsandbytes(matrix: Tensor) -> Tensor:
    """A matrix in NF4 with double quantization, restored."""
    codes, state = functional.quantize_4bit(
        matrix.contiguous(), blocksize=64, quant_type="nf4", compress_statistics=True
    )
    return functional.dequantize_4bit(codes, state)


def test_logits_and_gradients_with_experts_in_4_bits(folder: Path) -> None:
    """Of adapters on everything, experts among them; PEFT's, on a model that has each expert's restored matrix."""
    adapter = everywhere(folder)
    base = open_hf_in_4_bits(folder / "hf")
    layers = model_layers(load_hf_config(folder / "hf"))
    with torch.no_grad():
        for name in layers.expert_members:
            parameter = base.get_parameter(name)
            parameter.copy_(torch.stack([by_bitsandbytes(matrix) for matrix in parameter]))
    theirs = PeftModel.from_pretrained(base, adapter, is_trainable=True)
    check(folder, adapter, theirs, make_inputs(open_hf(folder / "hf")), "nf4")


@pytest.mark.parametrize("kind", ["nf4", "fp8"])
def test_it_does_not_matter_who_divides_experts(folder: Path, kind: str) -> None:
    tensor = model_layers(load_hf_config(folder / "hf")).expert_tensors[0]
    weight = torch.randn(6, 10, 512, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 7)[:, None, None]
    whole: Any = quantize_experts(weight, tensor, kind)
    halves = [quantize_experts(half, tensor, kind).dequantize() for half in weight.chunk(2)]
    assert torch.equal(whole.dequantize(), torch.cat(halves))
    assert (whole.dequantize() - weight.flatten(0, 1)).abs().mean() < 0.1 * weight.abs().mean()
    assert whole.num_weights == weight.numel() and whole.num_bytes < (0.6 if kind == "nf4" else 1.1) * weight.numel()
