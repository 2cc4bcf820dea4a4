"""Mllama's vision transformer: the tiles of an image are one sequence, for local layers and then gated global ones.

transformers pads every image to the same number of tiles, and every tile to a multiple of 8 patches. What stands in the
image sees that padding, so that it is computed here too; a tile of padding is zero after normalization, and not sent.

i: images, k: tiles of every image, p: patches of a tile, n: p and the class token, m: n and padding, h: hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.vision_module.vision_module import VisionModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from llava_mcore.media.batch_fields import ASPECT_RATIO_IDS, MEDIA_SEQLENS, PIXEL_VALUES
from llava_mcore.models.attention.sdpa import SDPAttention
from llava_mcore.models.language.cross_attention import gate_spec
from llava_mcore.models.vision.encoder_layers import encoder_layer_spec, without_bias
from llava_mcore.models.vision.features import FeatureChoice
from llava_mcore.models.vision.replicated import process_groups
from llava_mcore.parallel.items import Items, MediaLengths
from llava_mcore.weights.names import LayerNames

_MULTIPLE = 8
"""Patches of a tile are padded to a multiple of this, as transformers does."""
_END_EPS = 1e-5
"""Epsilon of the norms around the layers, which transformers does not configure."""


@dataclass(frozen=True)
class TiledShape:
    """Sizes that TransformerConfig lacks. `num_local`: layers before the global ones. `num_ratios`: grids of tiles,
    counted from 1."""

    image_size: int
    patch_size: int
    num_tiles: int
    num_local: int
    num_ratios: int
    names: LayerNames
    layers_name: str = "transformer.layers."
    global_layers_name: str = "global_transformer.layers."
    conv_name: str = "patch_embedding"

    @property
    def num_patches(self) -> int:
        """Return p."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_positions(self) -> int:
        """Return n."""
        return self.num_patches + 1

    @property
    def padded_positions(self) -> int:
        """Return m."""
        return -(-self.num_positions // _MULTIPLE) * _MULTIPLE


class MaskedSelfAttention(SDPAttention):
    """Full attention with a mask bool [i, 1, s, s], True where a query sees a key."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, *_: Any, **__: Any
    ) -> Tensor:
        """Return [s, i, heads * d] of [s, i, heads, d]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)


class TiledTransformer(VisionModule):
    """Tiles → patches, positions and grids → local layers → global layers → features of both."""

    def __init__(self, config: TransformerConfig, shape: TiledShape, features: FeatureChoice) -> None:
        super().__init__(config=config)
        self.shape, self.features = shape, features
        hidden, dtype, n = config.hidden_size, config.params_dtype, shape.num_positions
        self.conv1 = nn.Conv2d(3, hidden, shape.patch_size, shape.patch_size, bias=False, dtype=dtype)
        self.class_token = nn.Parameter(torch.randn(hidden, dtype=dtype) * config.init_method_std)
        self.position_embeddings = nn.Parameter(torch.randn(n, hidden, dtype=dtype) * config.init_method_std)
        # What depends on the grid of tiles is scaled by gates.
        self.position_gate, self.pre_tile_gate, self.post_tile_gate = (
            nn.Parameter(torch.zeros(1, dtype=dtype)) for _ in range(3)
        )
        rows, k = shape.num_ratios + 1, shape.num_tiles
        self.tile_position_embeddings = nn.Embedding(rows, k * n * hidden, dtype=dtype)
        self.pre_tile_embeddings = nn.Embedding(rows, k * hidden, dtype=dtype)
        self.post_tile_embeddings = nn.Embedding(rows, k * hidden, dtype=dtype)
        self.ln_pre, self.ln_post = (WrappedTorchNorm(config, hidden, eps=_END_EPS) for _ in range(2))
        self.decoder = _block(config, shape.num_local, gated=False)
        self.global_decoder = _block(config, config.num_layers - shape.num_local, gated=True)

    def blank(self, pixels: Tensor, media: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor], int]:
        """Return the arguments of a forward pass on one blank image, on the device of `pixels`."""
        fields = {
            ASPECT_RATIO_IDS: media[ASPECT_RATIO_IDS].new_ones(1),
            MEDIA_SEQLENS: media[MEDIA_SEQLENS].new_full((1,), self.shape.num_patches),
        }
        return pixels.new_zeros(1, 3, self.shape.image_size, self.shape.image_size), {**media, **fields}, 0

    def items(self, media: Mapping[str, Tensor], lengths: MediaLengths) -> Items:
        """Return what belongs to each image: its tiles and numbers, and k rows of the output."""
        tiles = [length // self.shape.num_patches for length in lengths[MEDIA_SEQLENS]]
        ones = [1] * len(tiles)
        rows = {PIXEL_VALUES: tiles, ASPECT_RATIO_IDS: ones, MEDIA_SEQLENS: ones}
        return Items(ones, [self.shape.num_tiles] * len(tiles), rows)

    def real_features(self, media: Mapping[str, Tensor]) -> Tensor:
        """Return which features of an image are those of its own tiles, bool [i, k * n]."""
        return self._own_tiles(media).repeat_interleave(self.shape.num_positions, dim=1)

    def _own_tiles(self, media: Mapping[str, Tensor]) -> Tensor:
        """Return which tiles are not padding, bool [i, k]."""
        lengths = media[MEDIA_SEQLENS]
        tiles = torch.arange(self.shape.num_tiles, device=lengths.device)
        return tiles < lengths[:, None] // self.shape.num_patches

    def forward(self, pixel_values: Tensor, media: Mapping[str, Tensor], max_seqlen: int = 0) -> Tensor:
        """Return features [i * k, n, l * h] of the images' own tiles [tiles, 3, height, width].

        l: the output of the global layers, and the chosen ones of local layers, whose numbers alternate.
        """
        shape, ids, own_tiles = self.shape, media[ASPECT_RATIO_IDS], self._own_tiles(media)
        k, n, m, count = shape.num_tiles, shape.num_positions, shape.padded_positions, len(media[ASPECT_RATIO_IDS])
        x = self._embedded(self.conv1(pixel_values).flatten(2).transpose(1, 2), ids, own_tiles)  # [i, k, n, h]
        x = F.pad(self.ln_pre(x), (0, 0, 0, m - n)).flatten(1, 2)  # [i, k * m, h]
        # Padding sees what is not, and is seen by that, but not by itself.
        padding = F.pad(own_tiles[:, :, None].expand(-1, -1, n), (0, m - n)).flatten(1).logical_not()
        mask = ~(padding[:, None, :, None] & padding[:, None, None, :])
        last, inner = self._local(x.transpose(0, 1).contiguous(), mask)
        of_tiles = self.post_tile_embeddings(ids).view(count, k, 1, -1)
        x = self.ln_post(last).transpose(0, 1).unflatten(1, (k, m)) + of_tiles * self.post_tile_gate.tanh()
        x = self.global_decoder(hidden_states=x.flatten(1, 2).transpose(0, 1).contiguous(), attention_mask=mask)
        states = [y.transpose(0, 1).unflatten(1, (k, m))[:, :, :n] for y in (x, *inner)]
        return torch.cat([states[0], torch.stack(states[1:], dim=-1).flatten(-2)], dim=-1).flatten(0, 1)

    def _embedded(self, patches: Tensor, ids: Tensor, own_tiles: Tensor) -> Tensor:
        """Return all tiles [i, k, n, h] with their positions, of the images' own [tiles, p, h]."""
        k, (p, h) = self.shape.num_tiles, patches.shape[1:]
        rows = own_tiles.flatten().long().cumsum(0) - 1  # of each tile in `patches`; padding takes the row of zeros
        x = F.pad(patches, (0, 0, 0, 0, 0, 1))[torch.where(own_tiles.flatten(), rows, len(patches))].view(-1, k, p, h)
        x = x + self.pre_tile_embeddings(ids).view(-1, k, 1, h) * self.pre_tile_gate.tanh()
        x = torch.cat([self.class_token.expand(*x.shape[:2], 1, h), x], dim=2)
        gate = self.position_gate.tanh()
        x = x + (1 - gate) * self.position_embeddings
        return x + gate * self.tile_position_embeddings(ids).view(-1, k, p + 1, h)

    def _local(self, x: Tensor, mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the output [k * m, i, h] of the local layers, and those of the chosen ones, in their order."""
        inner = [layer - 1 for layer in self.features.layers[1:]]
        if torch.is_grad_enabled() and self.config.recompute_granularity is not None and not x.requires_grad:
            x.requires_grad_()  # recomputation skips what has no input with a gradient
        result = self.decoder(hidden_states=x, attention_mask=mask, extract_layer_indices=set(inner))
        last, extracted = result if inner else (result, [])
        states = dict(zip(sorted(set(inner)), extracted, strict=True))
        return last, [states[i] for i in inner]


def _block(config: TransformerConfig, num_layers: int, *, gated: bool) -> TransformerBlock:
    """Return layers without a norm after them."""
    of_block = copy(config)
    of_block.num_layers = num_layers
    spec: ModuleSpec = encoder_layer_spec(of_block)
    attention = spec.submodules.self_attention.submodules
    attention.linear_qkv, attention.linear_proj = map(without_bias, (attention.linear_qkv, attention.linear_proj))
    attention.core_attention = MaskedSelfAttention
    if gated:
        spec.submodules.self_attn_bda = spec.submodules.mlp_bda = gate_spec(of_block)
    return TransformerBlock(
        of_block, spec, post_layer_norm=False, post_process=False, pg_collection=process_groups(of_block)
    )
