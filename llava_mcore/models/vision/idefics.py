"""The SigLIP towers of Idefics3 and SmolVLM: features after the last norm, positions from the location in the picture.

transformers finds a patch's position by its fraction of the picture's height and width. Tiles have the tower's size
here, so that the fractions are those of the tower's own grid.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import PretrainedConfig

from llava_mcore.errors import ConversionError
from llava_mcore.mapping.sharding import REPLICATED
from llava_mcore.mapping.table import Entry
from llava_mcore.models.vision.encoder_layers import WEIGHT_BIAS
from llava_mcore.models.vision.geometry import image_side, patch_side
from llava_mcore.models.vision.siglip import Siglip
from llava_mcore.models.vision.transformer import VisionShape


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
                "supported: take pictures of another size (26, 27 and 32 patches per side, for example, are exact)"
            )
        return super().config_from_hf(hf, num_layers)

    def shape(self, hf: PretrainedConfig) -> VisionShape:
        """Return the parts around the layers."""
        return replace(super().shape(hf), post_norm=True)

    def weight_entries(self, hf: PretrainedConfig, *, megatron: str, prefix: str, num_layers: int) -> list[Entry]:
        """Return the entries of all layers and of everything before and after them."""
        norm = Entry(megatron + "ln_post.{wb}", prefix + "post_layernorm.{wb}", REPLICATED).expand(wb=WEIGHT_BIAS)
        return [*super().weight_entries(hf, megatron=megatron, prefix=prefix, num_layers=num_layers), *norm]

    def unused(self, hf: PretrainedConfig, *, prefix: str, num_layers: int) -> dict[str, str]:
        """Return the tensors that training does not use, with the reason."""
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
