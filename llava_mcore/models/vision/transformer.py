"""The vision transformer that all towers share, with Megatron's parameter names (those of CLIPViTModel).

megatron-core's CLIPViTModel is not used: it needs Transformer Engine for its norms, refuses images that are no
multiple of the patch (SigLIP-so400m: 384 / 14) and knows no feature layers.

b: images, p: patches, s: p and the tokens before them (class token, registers), h: hidden size, l: number of
feature layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.common.vision_module.vision_module import VisionModule
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from llava_mcore.media.batch_fields import PIXEL_VALUES
from llava_mcore.models.vision.encoder_layers import USUAL_NAMES, encoder_layer_spec, use_fewer_kernels, without_bias
from llava_mcore.models.vision.features import FeatureChoice
from llava_mcore.models.vision.replicated import process_groups
from llava_mcore.parallel.items import Items, MediaLengths
from llava_mcore.weights.names import LayerNames

# Names in checkpoints: those of the InternViT in Megatron-LM's examples.
LAYER_SCALE_NAMES = {"self_attn_bda.scale": "ls1", "mlp_bda.scale": "ls2"}
ALL_HEADS_EPS = 1e-6
"""Epsilon of the norms over all heads in transformers, which has no setting for it."""


class LayerScale(nn.Module):
    """Takes the place of megatron-core's bias-dropout-add: residual + dropout(scale * (x + bias)).

    s: positions, b: images, h: hidden size.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden_size, dtype=dtype))

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Return a function of ((x [s, b, h], bias [h] or None), residual [s, b, h], dropout)."""

        def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            x, bias = x_with_bias
            x = x if bias is None else x + bias
            return residual + F.dropout(self.scale * x, dropout, training)

        return add


class AllHeadsNorm(nn.Module):
    """RMSNorm over the heads of all ranks. Every rank has the whole weight; its gradient is summed over them."""

    def __init__(self, size: int, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
        """size: of all heads. group: the ranks that divide them."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """Return the heads [s, b, n, d], rounded as transformers does."""
        weight, wide = self.weight, x.float()
        squares = wide.pow(2).sum((-2, -1), keepdim=True)
        if self.group.size() > 1:
            weight = copy_to_tensor_model_parallel_region(weight, group=self.group)
            # Each rank has a part of the sum, and what depends on the sum in its own heads.
            squares = reduce_from_tensor_model_parallel_region(squares, group=self.group)
            squares = copy_to_tensor_model_parallel_region(squares, group=self.group)
        local_weight = weight.chunk(self.group.size())[self.group.rank()].view(x.shape[-2:])
        return local_weight * (wide * torch.rsqrt(squares / len(self.weight) + ALL_HEADS_EPS)).to(x.dtype)


class NormedHeadsAttention(SelfAttention):
    """Self-attention that normalizes queries and keys over all heads together (InternViT-6B).

    s: positions, b: images, n: heads of this tensor-parallel rank, d: head size.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        size = self.config.num_attention_heads * self.hidden_size_per_attention_head
        norms = (AllHeadsNorm(size, self.config.params_dtype, self.pg_collection.tp) for _ in range(2))
        self.query_norm, self.key_norm = norms

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Return query, key and value [s, b, n, d], the first two normalized (called by megatron-core's forward)."""
        query, key, *rest = super().get_query_key_value_tensors(*args, **kwargs)
        return (self.query_norm(query), self.key_norm(key), *rest)


@dataclass(frozen=True)
class VisionShape:
    """The differences between the families, beside TransformerConfig.

    `post_norm`: the features are those after the tower's last norm. `qkv_bias`: queries, keys and values have a bias.
    `normed_heads`: queries and keys are normalized over all heads.
    `num_registers`: trained tokens between the class token and the patches, without positions. `names`, `conv_name` and
    `layers_name`: Hugging Face's, of the modules in a layer, the patch embedding and the list of layers.
    """

    image_size: int
    patch_size: int
    class_token: bool
    conv_bias: bool
    pre_norm: bool
    num_registers: int = 0
    layer_scale: bool = False
    post_norm: bool = False
    qkv_bias: bool = True
    normed_heads: bool = False
    names: LayerNames = USUAL_NAMES
    conv_name: str = "embeddings.patch_embedding"
    layers_name: str = "encoder.layers."

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2


def layer_spec(config: TransformerConfig, shape: VisionShape) -> ModuleSpec:
    """Return the encoder layer, with what this tower omits or adds."""
    spec = encoder_layer_spec(config)
    attention = spec.submodules.self_attention
    if not shape.qkv_bias:
        attention.submodules.linear_qkv = without_bias(attention.submodules.linear_qkv)
    if shape.normed_heads:
        attention.module = NormedHeadsAttention
    if shape.layer_scale:
        scale = {"hidden_size": config.hidden_size, "dtype": config.params_dtype}
        layer = spec.submodules
        layer.self_attn_bda, layer.mlp_bda = (ModuleSpec(module=LayerScale, params=scale) for _ in range(2))
        layer.sharded_state_dict_keys_map = layer.sharded_state_dict_keys_map | LAYER_SCALE_NAMES
    return spec


class VisionTransformer(VisionModule):
    """Patches → positions → the layers up to the last feature layer → features."""

    def __init__(self, config: TransformerConfig, shape: VisionShape, features: FeatureChoice) -> None:
        super().__init__(config=config)
        self.shape, self.features = shape, features
        hidden, dtype = config.hidden_size, config.params_dtype
        self.conv1 = nn.Conv2d(3, hidden, shape.patch_size, shape.patch_size, bias=shape.conv_bias, dtype=dtype)
        if shape.class_token:
            self.class_token = nn.Parameter(torch.randn(1, 1, hidden, dtype=dtype) * config.init_method_std)
        if shape.num_registers:
            registers = torch.randn(1, shape.num_registers, hidden, dtype=dtype) * config.init_method_std
            self.registers = nn.Parameter(registers)
        num_positions = shape.num_patches + int(shape.class_token)
        self.position_embeddings = nn.Embedding(num_positions, hidden, dtype=dtype)
        if shape.pre_norm:
            self.ln_pre = WrappedTorchNorm(config=config, hidden_size=hidden, eps=config.layernorm_epsilon)
        self.decoder = TransformerBlock(
            config,
            layer_spec(config, shape),
            post_layer_norm=False,
            post_process=False,
            pg_collection=process_groups(config),
        )
        if shape.post_norm:
            self.ln_post = WrappedTorchNorm(config=config, hidden_size=hidden, eps=config.layernorm_epsilon)
        if config.transformer_impl == "transformer_engine":
            use_fewer_kernels(self.decoder)

    def blank(self, pixels: Tensor, media: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor], int]:
        """Return the arguments of a forward pass on one blank image, on the device of `pixels`."""
        return pixels.new_zeros(1, 3, self.shape.image_size, self.shape.image_size), media, 0

    def items(self, media: Mapping[str, Tensor], lengths: MediaLengths) -> Items:
        """Return what belongs to each tile: its pixels, and a row of the output."""
        ones = [1] * len(media[PIXEL_VALUES])
        return Items(ones, ones, {PIXEL_VALUES: ones})

    def forward(self, pixel_values: Tensor, media: Mapping[str, Tensor], max_seqlen: int = 0) -> Tensor:
        """Return features [b, s (- 1), l*h] of images [b, 3, height, width]; nothing else is looked at."""
        x = self.conv1(pixel_values).flatten(2).transpose(1, 2)  # [b, p, h]; a remainder of the image is ignored
        if self.shape.class_token:
            x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        # Called as a module, before which data parallelism waits for the weight.
        x = x + self.position_embeddings(torch.arange(x.shape[1], device=x.device))
        if self.shape.num_registers:
            x = torch.cat([x[:, :1], self.registers.expand(x.shape[0], -1, -1), x[:, 1:]], dim=1)
        if self.shape.pre_norm:
            x = self.ln_pre(x)
        taken = self._hidden_states(x.transpose(0, 1).contiguous())
        out = torch.cat(taken, dim=-1).transpose(0, 1)  # [b, s, l*h]
        if self.shape.post_norm:
            out = self.ln_post(out)
        return out[:, 1:] if self.features.drop_first_token else out

    def _hidden_states(self, embedding: Tensor) -> list[Tensor]:
        """Return the chosen hidden states [s, b, h], in the order of the choice."""
        last = self.features.num_layers
        inner = {i - 1 for i in self.features.layers if 0 < i < last}
        if torch.is_grad_enabled() and self.config.recompute_granularity is not None and not embedding.requires_grad:
            embedding.requires_grad_()  # recomputation skips what has no input with a gradient
        result = self.decoder(hidden_states=embedding, attention_mask=None, extract_layer_indices=inner)
        final, extracted = result if inner else (result, [])
        states = {0: embedding, last: final}
        states |= dict(zip((i + 1 for i in sorted(inner)), extracted, strict=True))
        taken = [states[i] for i in self.features.layers]
        for state in taken:
            if state.requires_grad:  # what comes back is ordered as [b, s, h], and every layer would copy it
                state.register_hook(Tensor.contiguous)
        return taken
