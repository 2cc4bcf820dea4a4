"""A LLaVA-1.5 shaped checkpoint of ours loads into megatron-core's own LLaVAModel and gives the same logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import LlavaForConditionalGeneration

import llava_mcore.parallel  # noqa: F401  isort: skip
from megatron.core import dist_checkpointing
from megatron.core.activations import quick_gelu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.multimodal.llava_model import LLaVAModel
from megatron.core.models.vision import clip_vit_model
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from llava_mcore.convert.import_hf import import_hf
from llava_mcore.parallel.groups import single_process
from llava_mcore.weights.names import FUSED_NORMS
from tests.helpers.tiny_hf import make_hf_llava

PATCHES = 576
COMMON = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


def llava_model(hf: LlavaForConditionalGeneration, rows: int, length: int) -> LLaVAModel:
    """LLaVA-1.5 as megatron-core's example builds it: 336 pixels, patch 14, features of the last layer but one."""
    text, vision = hf.config.text_config, hf.config.vision_config
    language = TransformerConfig(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        ffn_hidden_size=text.intermediate_size,
        num_attention_heads=text.num_attention_heads,
        num_query_groups=text.num_key_value_heads,
        normalization="RMSNorm",
        layernorm_epsilon=text.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        **COMMON,
    )
    language.language_model_type = "llama"
    tower = TransformerConfig(
        num_layers=vision.num_hidden_layers - 1,
        hidden_size=vision.hidden_size,
        ffn_hidden_size=vision.intermediate_size,
        num_attention_heads=vision.num_attention_heads,
        layernorm_epsilon=vision.layer_norm_eps,
        activation_func=quick_gelu,
        add_qkv_bias=True,
        **COMMON,
    )
    tower.vision_model_type = "clip"
    width = text.hidden_size
    projector = TransformerConfig(
        num_layers=1, hidden_size=width, ffn_hidden_size=width, num_attention_heads=1, activation_func=F.gelu, **COMMON
    )
    encoder = get_vit_layer_with_local_spec()
    encoder.submodules.sharded_state_dict_keys_map = FUSED_NORMS  # those of its Transformer Engine layers
    return LLaVAModel(
        language,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        rows,
        length,
        tower,
        encoder,
        True,
        projector,
        MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
        language_position_embedding_type="rope",
        parallel_output=False,
        img_h=336,
        img_w=336,
        patch_dim=14,
        image_token_index=-200,
    )


def test_same_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core's own LLaVA model reads our checkpoint and gives Hugging Face's logits."""
    # Without Transformer Engine the tower's default norm is torch's, which takes other arguments.
    defaults = clip_vit_model.CLIPViTModel.__init__.__defaults__
    norm = tuple(WrappedTorchNorm if x is torch.nn.LayerNorm else x for x in defaults)
    monkeypatch.setattr(clip_vit_model.CLIPViTModel.__init__, "__defaults__", norm)
    hf = make_hf_llava(
        tmp_path / "hf", vision_overrides={"image_size": 336}, text_overrides={"max_position_embeddings": 1024}
    )
    checkpoint = import_hf(tmp_path / "hf", tmp_path / "megatron", tensor_parallel=2)
    text = torch.randint(5, 300, (1, 30), generator=torch.Generator().manual_seed(3))
    pixels = torch.randn(1, 3, 336, 336, generator=torch.Generator().manual_seed(4))
    placeholder = torch.cat([text[:, :4], torch.full((1, 1), -200), text[:, 4:]], dim=1)
    expanded = torch.cat([text[:, :4], torch.full((1, PATCHES), hf.config.image_token_id), text[:, 4:]], dim=1)
    with single_process(), torch.no_grad():
        model = llava_model(hf, rows=512, length=PATCHES + 30).eval()
        loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(checkpoint))
        model.load_state_dict(loaded["model"])
        tiles = torch.ones(1, dtype=torch.int)
        positions = torch.arange(placeholder.shape[1])[None]
        out, _ = model(pixels, placeholder, positions, None, num_image_tiles=tiles)
        expected = hf(input_ids=expanded, pixel_values=pixels).logits
    difference = (out[..., : expected.shape[-1]] - expected).abs().max().item()
    assert difference <= 1e-5, difference
