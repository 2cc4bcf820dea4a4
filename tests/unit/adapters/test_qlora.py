"""NF4's codes are bitsandbytes', and the model computes what transformers' 4-bit model does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit

from llava_mcore.adapters.attach import linear_modules
from llava_mcore.adapters.linear_layers import MegatronLinear, ModelLayers, model_layers
from llava_mcore.adapters.quantize_model import quantize_model
from llava_mcore.adapters.quantized import NF4_BLOCK, SCALE_BLOCK, Nf4, to_fp8, to_nf4
from llava_mcore.checkpoint.layout import latest_checkpoint
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.convert.load_model import load_part
from llava_mcore.convert.logits_worker import forward
from llava_mcore.errors import ConfigError
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.parallel.groups import join_alone
from tests.helpers.cases import hf_logits, make_inputs
from tests.helpers.peft_models import open_hf_in_4_bits
from tests.helpers.tiny_hf import make_hf_llava

WIDE = {"hidden_size": 128, "intermediate_size": 256}


@pytest.fixture(scope="module", params=["llama", "phi3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Matrices with rows of several blocks; Phi-3's are fused in files too."""
    root = tmp_path_factory.mktemp("qlora")
    make_hf_llava(root / "hf", text=request.param, text_overrides=WIDE)
    import_hf(root / "hf", root / "megatron")
    return root


@pytest.fixture(scope="module")
def layers(folder: Path) -> ModelLayers:
    return model_layers(load_hf_config(folder / "hf"))


def language(layers: ModelLayers) -> list[MegatronLinear]:
    return [linear for linear in layers.linears if linear.name.startswith("language_model.decoder.layers.1.")]


def on_ranks(linear: MegatronLinear, matrices: list[torch.Tensor], tp_size: int) -> list[Nf4]:
    """Quantize what every rank holds; each is handed the others' scales."""
    full = linear.entry.to_megatron(dict(zip(linear.entry.hf_names, matrices, strict=True)))
    shards = linear.entry.shard.split(full, tp_size)
    layout, _ = linear.blocks(tp_size)

    def scales(shard: torch.Tensor) -> list[torch.Tensor]:
        parts = layout.to_hf(shard)
        return [quantize_4bit(x.contiguous(), quant_type="nf4")[1].absmax.view(len(x), -1) for x in parts]

    of_all = [scales(shard) for shard in shards]

    def make(rank: int) -> Nf4:
        calls = iter(range(len(of_all[0])))
        return to_nf4(
            shards[rank], linear, tp_size, rank, lambda _: [found[i] for i in [next(calls)] for found in of_all]
        )

    return [make(rank) for rank in range(tp_size)]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_codes_are_those_of_bitsandbytes(layers: ModelLayers, tp_size: int) -> None:
    """Codes, the codes of scales, their scales and what all of it stands for: bit for bit, however it is divided."""
    torch.manual_seed(0)
    for linear in language(layers):
        shapes = [tuple(x.shape) for x in linear.entry.to_hf(torch.empty(full_shape(linear), device="meta")).values()]
        matrices = [torch.randn(shape) for shape in shapes]
        ranks = on_ranks(linear, matrices, tp_size)
        expected = [quantize_4bit(x, quant_type="nf4", compress_statistics=True) for x in matrices]
        whole = linear.entry.shard.join([x.dequantize() for x in ranks])
        for matrix, (codes, state) in zip(linear.entry.layout.to_hf(whole), expected, strict=True):
            assert torch.equal(matrix, dequantize_4bit(codes, state))
        nested = linear.entry.shard.join([x.scale_codes for x in ranks])
        packed = linear.entry.shard.join([x.codes for x in ranks])
        for found, found_scales, (codes, state) in zip(
            linear.entry.layout.to_hf(packed), linear.entry.layout.to_hf(nested), expected, strict=True
        ):
            assert torch.equal(found.reshape(-1), codes.view(-1))
            assert torch.equal(found_scales.reshape(-1), state.absmax)
            assert state.state2.blocksize == SCALE_BLOCK and state.blocksize == NF4_BLOCK


def full_shape(linear: MegatronLinear) -> tuple[int, int]:
    """Return the shape of a layer's matrix from its parts' widths."""
    hidden, inner = WIDE["hidden_size"], WIDE["intermediate_size"]
    if "linear_qkv" in linear.name:
        return 2 * hidden, hidden  # 8 heads and 2 x 4 groups
    return {"linear_proj": (hidden, hidden), "linear_fc1": (2 * inner, hidden), "linear_fc2": (hidden, inner)}[
        linear.name.rpartition(".")[2]
    ]


def test_logits_are_those_of_transformers_in_4_bits(folder: Path, layers: ModelLayers) -> None:
    theirs = open_hf_in_4_bits(folder / "hf")
    inputs = make_inputs(theirs)
    expected = hf_logits(theirs, inputs)
    found = logits(folder, layers, "nf4", inputs)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    exact = logits(folder, layers, None, inputs)
    assert (exact - expected).abs().max() > 1e-2 * expected.abs().max(), "4 bits matter"
    coarse = logits(folder, layers, "fp8", inputs)
    assert 0 < (coarse - exact).norm() < 0.5 * (expected - exact).norm(), "8 bits matter less"


def logits(folder: Path, layers: ModelLayers, kind: str | None, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    groups = join_alone()
    model = load_part(groups, latest_checkpoint(folder / "megatron")[0]).requires_grad_(False)
    if kind is not None:
        quantize_model([model], layers, kind, groups)
        modules = linear_modules(model)
        assert modules["language_model.decoder.layers.0.mlp.linear_fc1"].weight.numel() == 0
        assert modules["vision_model.decoder.layers.0.mlp.linear_fc1"].weight.numel() > 0
    found = forward(model, inputs)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_fp8_of_blocks_of_zeros_and_of_tiny_values(layers: ModelLayers, dtype: torch.dtype) -> None:
    """Down to fp16's smallest number: a scale of 0 would make NaN, one that is too small would clip."""
    largest = torch.tensor([0.0, 6e-8, 1e-7, 1.1e-5, 2.0e-5, 3.7e-5, 1e-3, 0.02, 1.0])
    weight = (largest[:, None] * torch.linspace(-1, 1, 128)).to(dtype)
    restored = to_fp8(weight, language(layers)[0], 1, 0, lambda x: [x]).dequantize()
    error = (restored.float() - weight.float()).abs().amax(1)
    step = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps
    assert (error <= largest / 16 + step / 2).all()


@pytest.mark.parametrize("quantizer", [to_nf4, to_fp8])
def test_blocks_do_not_cross_ranks(layers: ModelLayers, quantizer: Any) -> None:
    row = next(linear for linear in language(layers) if linear.is_row_parallel)
    with pytest.raises(ConfigError, match=r"not a whole number of blocks of .* on each of 4 tensor-parallel ranks"):
        quantizer(torch.randn(128, 32), row, 4, 0, lambda x: [x] * 4)
