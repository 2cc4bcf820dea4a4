"""What the Hugging Face peers of each class need beyond LLaVA-1.5's. Another class is one more entry here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2AudioForConditionalGeneration,
)
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.samples import Batch
from llava_mcore.media.batch_fields import MEDIA_SEQLENS, PIXEL_SCALE, PIXEL_VALUES, Field, normalize
from llava_mcore.media.media import MediaPlan, MediaTokens, Size

IMAGE_SIZES, IMAGE_GRID = "image_sizes", "image_grid_thw"
"""Fields of a micro-batch's media: heights and widths [images, 2], and patches in time, height and width
[images, 3]."""


class PeerClass:
    """LlavaForConditionalGeneration, and what the classes below do not say otherwise."""

    tower = "vision_tower"
    """Its name in the model."""
    packs_pictures = False
    """Whether the tower computes on patches of all images as one pack."""

    def assets(self, assets: Assets) -> Assets:
        """Return what the loader reads with, so that it hands over all that the model takes."""
        return assets

    def inputs(self, config: PretrainedConfig, batch: Batch, device: torch.device) -> dict[str, Any]:
        """Return arguments of the model's forward that describe images; tensors on the device, or sizes as lists."""
        return {"pixel_values": pixels(batch, device)}

    def blank(self, config: PretrainedConfig, device: torch.device) -> dict[str, Any]:
        """Return arguments of `get_image_features` for one blank image, for micro-batches without any: transformers
        takes no empty tensor, and every rank must compute a gradient of every weight."""
        size = config.vision_config.image_size
        return {"pixel_values": torch.zeros(1, 3, size, size, device=device)}

    def new(self, config: PretrainedConfig, **options: Any) -> PreTrainedModel:
        """Return a model without weights of its own."""
        return AutoModelForImageTextToText.from_config(config, **options)

    def unused(self, base: nn.Module, pictures: dict[str, Any]) -> Sequence[Tensor]:
        """Return the features of a blank image, by the model without its output layer."""
        return base.get_image_features(**pictures).pooler_output

    def use_liger(self, model: PreTrainedModel) -> None:
        """Replace layers by Liger's; only where it is installed, and on a GPU."""
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        decoder = model.model.language_model
        apply = MODEL_TYPE_TO_APPLY_LIGER_FN[decoder.config.model_type]
        apply(model=decoder, cross_entropy=False, fused_linear_cross_entropy=False)


class Onevision(PeerClass):
    """LlavaOnevisionForConditionalGeneration: it cuts images by their sizes, on the host."""

    def assets(self, assets: Assets) -> Assets:
        """Return assets that also say what size an image had."""
        return replace(assets, plan=with_values(assets.plan, IMAGE_SIZES, lambda size: size))

    def inputs(self, config: PretrainedConfig, batch: Batch, device: torch.device) -> dict[str, Any]:
        """Return tiles [tiles, 3, h, w] and the pictures' sizes."""
        sizes = batch.media[IMAGE_SIZES].tolist()  # of a tensor on a GPU, the model would wait for each
        return super().inputs(config, batch, device) | {"image_sizes": sizes}

    def blank(self, config: PretrainedConfig, device: torch.device) -> dict[str, Any]:
        """Return a base view and a grid of one tile."""
        size = config.vision_config.image_size
        return {"pixel_values": torch.zeros(2, 3, size, size, device=device), "image_sizes": [[size, size]]}


class Qwen25VL(PeerClass):
    """Qwen2_5_VLForConditionalGeneration: patches [n, 3 * 2 * 14 * 14] of images of any size."""

    tower = "visual"
    packs_pictures = True

    def assets(self, assets: Assets) -> Assets:
        """Return assets that also say how many patches an image has."""
        plan: Any = assets.plan
        return replace(assets, plan=with_values(plan, IMAGE_GRID, lambda size: plan.grid_of(*size)))

    def inputs(self, config: PretrainedConfig, batch: Batch, device: torch.device) -> dict[str, Any]:
        """Return patches, grids, and what the tower would otherwise work out on the GPU, waiting for it.

        Its names are those of transformers' `accepts_precomputed_kwargs`.
        """
        grid, vision = batch.media[IMAGE_GRID], config.vision_config
        merge = vision.spatial_merge_size
        bounds = get_vision_cu_seqlens(grid)
        order, windows = get_vision_window_index(grid, merge, vision.window_size, vision.patch_size)
        windows = torch.unique_consecutive(windows)
        tensors = {
            "image_position_ids": get_vision_position_ids(grid, merge),
            "image_cu_seqlens": bounds,
            "image_window_index": order,
            "image_cu_window_seqlens": windows,
        }
        longest = {"image_max_seqlen": bounds, "image_max_window_seqlen": windows}
        return {
            "pixel_values": pixels(batch, device),
            "image_grid_thw": grid,
            **{name: to_device(x, device) for name, x in tensors.items()},
            **{name: int(x.diff().max()) for name, x in longest.items()},
        }

    def blank(self, config: PretrainedConfig, device: torch.device) -> dict[str, Any]:
        """Return an image of one feature."""
        vision = config.vision_config
        merge, values = vision.spatial_merge_size, vision.temporal_patch_size * vision.patch_size**2
        pixel_values = torch.zeros(merge**2, vision.in_channels * values, device=device)
        return {"pixel_values": pixel_values, "image_grid_thw": torch.tensor([[1, merge, merge]])}

    def use_liger(self, model: PreTrainedModel) -> None:
        """Replace layers of decoder and tower by Liger's."""
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2_5_vl

        apply_liger_kernel_to_qwen2_5_vl(model=model, fused_linear_cross_entropy=False)


class Qwen2Audio(PeerClass):
    """Qwen2AudioForConditionalGeneration: every clip padded to the encoder's 30 seconds."""

    tower = "audio_tower"

    def new(self, config: PretrainedConfig, **options: Any) -> PreTrainedModel:
        """Return a model without weights of its own."""
        return Qwen2AudioForConditionalGeneration._from_config(config, **options)

    def inputs(self, config: PretrainedConfig, batch: Batch, device: torch.device) -> dict[str, Any]:
        """Return mel frames [clips, bins, frames] and their mask, out of the rows of packed clips."""
        hidden, rows = batch.media[MEDIA_SEQLENS].tolist(), batch.media[PIXEL_VALUES]
        most = 2 * config.audio_config.max_source_positions
        padded, mask = torch.zeros(len(hidden), rows.shape[1], most), torch.zeros(len(hidden), most, dtype=torch.int64)
        for clip, seen, own in zip(padded, mask, rows.split([2 * n + 2 for n in hidden]), strict=True):
            frames = own[1 : 1 + most]
            clip[:, : len(frames)] = frames.t()
            seen[: len(own) - 2] = 1  # as many hidden frames; an odd number of mel frames counts as one more
        return {"input_features": to_device(padded, device), "feature_attention_mask": to_device(mask, device)}

    def blank(self, config: PretrainedConfig, device: torch.device) -> dict[str, Any]:
        """Return two hidden frames of silence."""
        encoder = config.audio_config
        mask = torch.zeros(1, 2 * encoder.max_source_positions, dtype=torch.int64, device=device)
        mask[:, :4] = 1
        frames = torch.zeros(1, encoder.num_mel_bins, 2 * encoder.max_source_positions, device=device)
        return {"input_features": frames, "feature_attention_mask": mask}

    def unused(self, base: nn.Module, pictures: dict[str, Any]) -> Sequence[Tensor]:
        """Return the features of a blank clip."""
        states = base.audio_tower(pictures["input_features"]).last_hidden_state
        return [base.multi_modal_projector(states)]


CLASSES: dict[str, PeerClass] = {
    **{"llava": PeerClass(), "llava_onevision": Onevision(), "qwen2_5_vl": Qwen25VL(), "qwen2_audio": Qwen2Audio()}
}
"""By model_type."""


def with_values(plan: MediaPlan, name: str, of_size: Callable[[Size], Sequence[int]]) -> MediaPlan:
    """Return a plan whose images also carry some numbers that their height and width decide, as a field `name`."""

    def tokens(sizes: Sequence[Size]) -> list[MediaTokens]:
        return [
            replace(item, values={**item.values, name: np.array([of_size(size)])})
            for item, size in zip(plan.tokens(sizes), sizes, strict=True)
        ]

    changed: Any = copy.copy(plan)
    changed.fields = dict(plan.fields) | {name: Field((torch.int64,), (len(of_size((56, 56))),))}
    changed.tokens = tokens
    return changed


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a host's tensor; on a GPU without waiting."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def pixels(batch: Batch, device: torch.device) -> Tensor:
    """Return pixel values as the image processor normalizes them; tiles [n, 3, h, w], or flat patches [n, values]."""
    found = batch.media[PIXEL_VALUES].to(device, non_blocking=True)
    scale = batch.media[PIXEL_SCALE].to(device, non_blocking=True)
    if found.ndim == 2:
        return normalize(found.view(len(found), 3, -1, 1), scale).view(len(found), -1)
    return normalize(found, scale)
