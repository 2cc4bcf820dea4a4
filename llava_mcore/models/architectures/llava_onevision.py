"""LLaVA-OneVision: like LLaVA-NeXT, with resized large grids, only base views for several images, and videos."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import ClassVar

from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    PretrainedConfig,
)

from llava_mcore.errors import ConversionError
from llava_mcore.media.anyres import ONEVISION_FIELDS, AnyRes, AnyResVideoPlan
from llava_mcore.media.batch_fields import Fields
from llava_mcore.media.media import MediaPlan, Processing
from llava_mcore.models.architectures.llava_next import LlavaNext

_ASPECT_RATIO = re.compile(r"anyres_max_(\d+)")


class LlavaOnevision(LlavaNext):
    """LlavaOnevisionForConditionalGeneration."""

    config_class = LlavaOnevisionConfig
    model_class = LlavaOnevisionForConditionalGeneration

    fields: ClassVar[Fields] = ONEVISION_FIELDS
    takes_videos = True

    def media(self, hf: PretrainedConfig, processing: Processing) -> MediaPlan:
        """Return the plan of base view and grid, and of frames if there is a video processor. Raises like `anyres`."""
        if processing.videos is None:
            return super().media(hf, processing)
        return AnyResVideoPlan(hf.image_token_id, self.anyres(hf), self.fields, hf.video_token_id)

    def anyres(self, hf: PretrainedConfig) -> AnyRes:
        """Return how images are split. Raises ConversionError also if that is not anyres_max_N."""
        match = _ASPECT_RATIO.fullmatch(str(hf.vision_aspect_ratio))
        if match is None:
            raise ConversionError(f"vision_aspect_ratio = {hf.vision_aspect_ratio!r}: expected 'anyres_max_9' or such")
        return replace(super().anyres(hf), max_tiles=int(match[1]), several_as_base=True)
