"""The towers of Qwen2-VL, 2.5-VL, 3-VL and Qwen3.5: packed patches of any size, rotary positions along two axes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionRotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLVisionRotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionRotaryEmbedding
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionRotaryEmbedding
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionRotaryEmbedding
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from llava_mcore.errors import ConversionError
from llava_mcore.media.batch_fields import (
    MEDIA_SEQLENS,
    PATCH_FIELDS,
    PATCH_POSITIONS,
    POSITION_ROWS,
    POSITION_WEIGHTS,
    WINDOW_ORDER,
    WINDOW_SEQLENS,
    Field,
    Fields,
    MediaWork,
)
from llava_mcore.models.activations import activation
from llava_mcore.models.vision.encoder_layers import layer_entries, padded_width
from llava_mcore.models.vision.families.base import PatchTower, TowerWork
from llava_mcore.models.vision.features import patch_side
from llava_mcore.models.vision.patches import PatchShape
from llava_mcore.weights.layouts import Reshape
from llava_mcore.weights.names import LayerNames
from llava_mcore.weights.table import REPLICATED, Entry

Grid = tuple[int, int, int]
"""Patches of an image or video: steps of time, rows, columns."""
NORM_EPS = 1e-6
"""Epsilon of every norm of these towers; transformers has no setting for it."""
_NAMES = LayerNames(
    norm_before="norm1",
    query_key_value=("attn.qkv",),
    attention_out="attn.proj",
    norm_between="norm2",
    into=("mlp.fc1",),
    out_of="mlp.fc2",
)


class QwenTower(PatchTower):
    """The common part of these towers."""

    uses_rope = True
    fields: ClassVar[Fields] = PATCH_FIELDS
    names: ClassVar[LayerNames] = _NAMES
    rotary: ClassVar[type[nn.Module]]
    conv_bias: ClassVar[bool] = False
    norm: ClassVar[str] = "LayerNorm"

    @abstractmethod
    def ffn_size(self, hf: PretrainedConfig) -> int:
        """Return the width inside the MLPs; where they are gated, of the gate alone."""

    def padded_ffn_size(self, hf: PretrainedConfig) -> int:
        """Return the width in the model, such as 3456 in place of Qwen2.5-VL's 3420."""
        return padded_width(self.ffn_size(hf))

    def num_layers(self, hf: PretrainedConfig) -> int:
        """Return the layers of the whole tower."""
        return int(hf.depth)

    def merged(self, hf: PretrainedConfig) -> int:
        """Return how many patches become one feature."""
        return int(hf.spatial_merge_size) ** 2

    def patch_dim(self, hf: PretrainedConfig) -> int:
        """Return the number of values in a flattened patch: a square of some frames."""
        return int(hf.in_channels) * int(hf.temporal_patch_size) * patch_side(hf) ** 2

    def config_from_hf(self, hf: PretrainedConfig, num_layers: int) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields."""
        return {
            "num_layers": num_layers,
            "hidden_size": self.hidden_size(hf),
            "ffn_hidden_size": self.padded_ffn_size(hf),
            "num_attention_heads": hf.num_heads,
            "activation_func": activation(hf.hidden_act, where="vision_config.hidden_act"),
            "gated_linear_unit": len(self.names.into) == 2,
            "normalization": self.norm,
            "layernorm_epsilon": NORM_EPS,
            "add_bias_linear": True,
            "add_qkv_bias": True,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        }

    def shape(self, hf: PretrainedConfig) -> PatchShape:
        """Return what surrounds the layers."""
        with torch.device("cpu"):  # also when the model is built without memory, on the meta device
            inv_freq: Tensor = self.rotary(hf).get_buffer("inv_freq").clone()
        return PatchShape(
            self.patch_dim(hf), self.merged(hf), self.conv_bias, inv_freq, self.names, ffn_size=self.ffn_size(hf)
        )

    def values(self, hf: PretrainedConfig, grid: Grid) -> dict[str, NDArray[Any]]:
        """Return the fields of one image or video, beside its pixels, by transformers' own functions."""
        frames, height, width = grid
        positions = get_vision_position_ids(torch.tensor([grid]), int(hf.spatial_merge_size))
        return {
            PATCH_POSITIONS: positions.numpy().astype(np.int32),
            MEDIA_SEQLENS: np.full(frames, height * width, dtype=np.int32),
        }

    def weight_entries(self, hf: PretrainedConfig, *, megatron: str, prefix: str, num_layers: int) -> list[Entry]:
        """Return the entries of the layers and of the patch embedding, a convolution in the files."""
        width, side = self.hidden_size(hf), patch_side(hf)
        flat = Reshape((width, hf.in_channels, hf.temporal_patch_size, side, side), (width, self.patch_dim(hf)))
        embedding = [Entry(megatron + "conv1.weight", prefix + "patch_embed.proj.weight", REPLICATED, flat)]
        if self.conv_bias:
            embedding.append(Entry(megatron + "conv1.bias", prefix + "patch_embed.proj.bias", REPLICATED))
        layers = partial(layer_entries, hf, megatron=megatron, prefix=prefix + "blocks.", names=self.names)
        gated, norm_bias = len(self.names.into) == 2, self.norm == "LayerNorm"
        ffn = self.ffn_size(hf), self.padded_ffn_size(hf)
        return embedding + layers(layers=range(num_layers), gated=gated, norm_bias=norm_bias, ffn=ffn)

    def unused(self, hf: PretrainedConfig, *, prefix: str, num_layers: int) -> dict[str, str]:
        """Return nothing: all layers are used."""
        return {}


class Qwen2VlTower(QwenTower):
    """Qwen2-VL's: layer norm, plain MLPs, whole images in every layer."""

    model_types = ("qwen2_vl_vision", "qwen2_vl")  # files on the hub call the tower by the name of the whole
    rotary = Qwen2VLVisionRotaryEmbedding

    def hidden_size(self, hf: PretrainedConfig) -> int:
        """Return the width of the tower's layers; `hidden_size` is that of the language model in this class."""
        return int(hf.embed_dim)

    def ffn_size(self, hf: PretrainedConfig) -> int:
        """Return the width inside the MLPs."""
        return int(hf.embed_dim * hf.mlp_ratio)


class Qwen25VlTower(QwenTower):
    """Qwen2.5-VL's: RMSNorm, gated MLPs, and windows in most layers."""

    model_types = ("qwen2_5_vl_vision", "qwen2_5_vl")
    fields: ClassVar[Fields] = {
        **PATCH_FIELDS,
        WINDOW_ORDER: Field((torch.int64,), index_of="features"),
        WINDOW_SEQLENS: Field((torch.int32,)),
    }
    names: ClassVar[LayerNames] = replace(_NAMES, into=("mlp.gate_proj", "mlp.up_proj"), out_of="mlp.down_proj")
    rotary = Qwen2_5_VLVisionRotaryEmbedding
    norm = "RMSNorm"

    def ffn_size(self, hf: PretrainedConfig) -> int:
        """Return the width of the gate inside the MLPs."""
        return int(hf.intermediate_size)

    def shape(self, hf: PretrainedConfig) -> PatchShape:
        """Return what surrounds the layers. Raises ConversionError for windows that are smaller than a token."""
        of_token = patch_side(hf) * hf.spatial_merge_size
        if hf.window_size < of_token:
            raise ConversionError(
                f"vision_config.window_size is {hf.window_size}, expected at least {of_token}, a token's side in pixels"
            )
        side = hf.window_size // of_token * hf.spatial_merge_size
        return replace(
            super().shape(hf), full_attention=frozenset(hf.fullatt_block_indexes), window_patches=side * side
        )

    def values(self, hf: PretrainedConfig, grid: Grid) -> dict[str, NDArray[Any]]:
        """Return the fields of one image or video, beside its pixels."""
        order, bounds = get_vision_window_index(
            torch.tensor([grid]),
            spatial_merge_size=int(hf.spatial_merge_size),
            window_size=int(hf.window_size),
            patch_size=patch_side(hf),
        )
        return super().values(hf, grid) | {
            WINDOW_ORDER: order.numpy(),
            WINDOW_SEQLENS: bounds.diff().numpy().astype(np.int32),
        }

    def work(self, hf: PretrainedConfig, media: MediaWork, num_layers: int) -> TowerWork:
        """Return what the layers compute on."""
        full = len([i for i in range(num_layers) if i in hf.fullatt_block_indexes])
        pairs = full * media.num_pairs + (num_layers - full) * media.num_window_pairs
        return TowerWork(media.num_patches, media.num_patches, pairs)


class Qwen3VlTower(QwenTower):
    """Qwen3-VL's: layer norm, plain MLPs, and a table of positions that is interpolated to every image's grid."""

    model_types = ("qwen3_vl_vision", "qwen3_vl")
    fields: ClassVar[Fields] = {
        **PATCH_FIELDS,
        POSITION_ROWS: Field((torch.int64,), (4,)),
        POSITION_WEIGHTS: Field((torch.float32,), (4,)),
    }
    names: ClassVar[LayerNames] = replace(_NAMES, into=("mlp.linear_fc1",), out_of="mlp.linear_fc2")
    rotary = Qwen3VLVisionRotaryEmbedding
    conv_bias = True

    def ffn_size(self, hf: PretrainedConfig) -> int:
        """Return the width inside the MLPs."""
        return int(hf.intermediate_size)

    def shape(self, hf: PretrainedConfig) -> PatchShape:
        """Return what surrounds the layers."""
        return replace(super().shape(hf), num_positions=int(hf.num_position_embeddings))

    def values(self, hf: PretrainedConfig, grid: Grid) -> dict[str, NDArray[Any]]:
        """Return the fields of one image or video, beside its pixels."""
        rows, weights = get_vision_interpolation_indices_and_weights(
            torch.tensor([grid]),
            num_grid_per_side=int(hf.num_position_embeddings**0.5),
            mode="bilinear",
            align_corners=True,
            spatial_merge_size=int(hf.spatial_merge_size),
        )
        return super().values(hf, grid) | {
            POSITION_ROWS: rows.numpy(),
            POSITION_WEIGHTS: weights.numpy().astype(np.float32),
        }

    def weight_entries(self, hf: PretrainedConfig, *, megatron: str, prefix: str, num_layers: int) -> list[Entry]:
        """Return the entries of the layers and of what comes before them."""
        positions = Entry(megatron + "position_embeddings.weight", prefix + "pos_embed.weight", REPLICATED)
        return [positions, *super().weight_entries(hf, megatron=megatron, prefix=prefix, num_layers=num_layers)]


class Qwen3VlMoeTower(Qwen3VlTower):
    """That of Qwen3-VL with experts, which are in the language model alone."""

    model_types = ("qwen3_vl_moe_vision", "qwen3_vl_moe")
    rotary = Qwen3VLMoeVisionRotaryEmbedding


class Qwen35Tower(Qwen3VlTower):
    """Qwen3.5's: that of Qwen3-VL without features of inner layers."""

    model_types = ("qwen3_5_vision", "qwen3_5")
    rotary = Qwen3_5VisionRotaryEmbedding


class Qwen35MoeTower(Qwen35Tower):
    """That of Qwen3.5 with experts, which are in the language model alone."""

    model_types = ("qwen3_5_moe_vision", "qwen3_5_moe")
    rotary = Qwen3_5MoeVisionRotaryEmbedding
