"""The SigLIP towers of Idefics2, Idefics3 and SmolVLM: features after the last norm, positions by location.

transformers finds a patch's position by its fraction of the image's height and width. Tiles of Idefics3 and SmolVLM
have the tower's size, so that the fractions are those of the tower's own grid. Idefics2's images have any size.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionEmbeddings

from llava_mcore.errors import ConversionError
from llava_mcore.media.batch_fields import TABLE_PATCH_FIELDS, Fields
from llava_mcore.models.vision.encoder_layers import USUAL_NAMES, WEIGHT_BIAS, layer_entries, transformer_fields
from llava_mcore.models.vision.families.base import PatchTower
from llava_mcore.models.vision.families.siglip import Siglip
from llava_mcore.models.vision.features import image_side, num_patches, patch_side
from llava_mcore.models.vision.patches import PatchShape
from llava_mcore.models.vision.transformer import VisionShape
from llava_mcore.weights.layouts import Reshape
from llava_mcore.weights.table import REPLICATED, Entry


class IdeficsSiglip(Siglip):
    """Files of Idefics3 use the name of the whole model for the tower."""

    model_types = ("idefics3_vision", "idefics3", "smolvlm_vision", "smolvlm")
    pair = None
    wrapped = False
    part_of_a_class = True

    def config_from_hf(self, hf: PretrainedConfig, num_layers: int) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields.

        Raises:
            ConversionError: a grid in which transformers rounds patches to the positions of other patches.
        """
        side = image_side(hf) // patch_side(hf)
        if not is_plain_grid(side):
            raise ConversionError(
                f"vision_config: image_size {image_side(hf)} and patch_size {patch_side(hf)} make a grid of {side} x "
                f"{side} patches, in which transformers rounds some to the positions of their neighbors; this is not "
                "supported: take images of another size (26, 27 and 32 patches per side, for example, are exact)"
            )
        return super().config_from_hf(hf, num_layers)

    def shape(self, hf: PretrainedConfig) -> VisionShape:
        """Return the parts around the layers."""
        return replace(super().shape(hf), post_norm=True)

    def weight_entries(self, hf: PretrainedConfig, *, megatron: str, prefix: str, num_layers: int) -> list[Entry]:
        """Return the entries of all layers and of everything before and after them."""
        entries = super().weight_entries(hf, megatron=megatron, prefix=prefix, num_layers=num_layers)
        return [*entries, *_last_norm(megatron, prefix)]

    def unused(self, hf: PretrainedConfig, *, prefix: str, num_layers: int) -> dict[str, str]:
        """Return the tensors that training does not use, with the reason."""
        return _old_buffer(prefix)


class Idefics2Siglip(PatchTower):
    """Files of Idefics2 use the name of the whole model for the tower."""

    model_types = ("idefics2_vision", "idefics2")
    fields: ClassVar[Fields] = TABLE_PATCH_FIELDS

    def config_from_hf(self, hf: PretrainedConfig, num_layers: int) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields."""
        return transformer_fields(hf, num_layers)

    def shape(self, hf: PretrainedConfig) -> PatchShape:
        """Return what surrounds the layers."""
        return PatchShape(
            patch_dim=self.patch_dim(hf),
            merged=1,
            conv_bias=True,
            inv_freq=None,
            names=USUAL_NAMES,
            num_positions=num_patches(hf),
            post_norm=True,
            layers_name="encoder.layers.",
            conv_name="embeddings.patch_embedding",
        )

    def weight_entries(self, hf: PretrainedConfig, *, megatron: str, prefix: str, num_layers: int) -> list[Entry]:
        """Return the entries of the layers and of everything before and after them; patches are flat here."""
        width, side, table = hf.hidden_size, patch_side(hf), "embeddings.position_embedding.weight"
        flat = Reshape((width, hf.num_channels, side, side), (width, self.patch_dim(hf)))
        conv = prefix + "embeddings.patch_embedding."
        return [
            Entry(megatron + "conv1.weight", conv + "weight", REPLICATED, flat),
            Entry(megatron + "conv1.bias", conv + "bias", REPLICATED),
            Entry(megatron + "position_embeddings.weight", prefix + table, REPLICATED),
            *layer_entries(hf, megatron=megatron, prefix=prefix + "encoder.layers.", layers=range(num_layers)),
            *_last_norm(megatron, prefix),
        ]

    def unused(self, hf: PretrainedConfig, *, prefix: str, num_layers: int) -> dict[str, str]:
        """Return the tensors that training does not use, with the reason."""
        return _old_buffer(prefix)


def position_rows(hf: PretrainedConfig, rows: int, columns: int) -> Tensor:
    """Return the rows [rows * columns], int64, of Idefics2's table of positions for an image of so many patches.

    transformers' own method is asked, of embeddings without weights: its bounds and roundings decide. The tensor is
    shared between calls.
    """
    return _looked_up_positions(image_side(hf) // patch_side(hf), rows, columns)


@functools.lru_cache(maxsize=128)  # the parts of an image, and many images, have the same grid of patches
def _looked_up_positions(table_side: int, rows: int, columns: int) -> Tensor:
    embeddings: Any = object.__new__(Idefics2VisionEmbeddings)
    nn.Module.__init__(embeddings)
    embeddings.patch_size = 1
    embeddings.num_patches_per_side = table_side
    embeddings.patch_embedding = lambda pixels: pixels.long()  # of zeros, to which it adds what it looks up
    embeddings.position_embedding = lambda ids: ids.unsqueeze(-1)
    with torch.device("cpu"):  # models may be on the meta device
        positions: Tensor = embeddings(torch.zeros(1, 1, rows, columns), torch.ones(1, rows, columns, dtype=torch.bool))
    return positions[0, :, 0]


def _last_norm(megatron: str, prefix: str) -> list[Entry]:
    norm = Entry(megatron + "ln_post.{wb}", prefix + "post_layernorm.{wb}", REPLICATED)
    return list(norm.expand(wb=WEIGHT_BIAS))


def _old_buffer(prefix: str) -> dict[str, str]:
    return {f"{prefix}embeddings.position_ids": "buffer of older transformers versions"}


def is_plain_grid(side: int) -> bool:
    """Return whether the patches of a tile of the tower's size have the positions 0, 1, … in order.

    The sums are transformers' own, in fp32 (`Idefics3VisionEmbeddings.forward`); a fraction that is rounded below its
    bound falls to the patch before it.
    """
    with torch.device("cpu"):  # models may be on the meta device
        bounds = torch.arange(1 / side, 1.0, 1 / side)
        fractions = (torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))).clamp(max=1.0 - 1e-6)
        return torch.equal(torch.bucketize(fractions, bounds, right=True), torch.arange(side))
