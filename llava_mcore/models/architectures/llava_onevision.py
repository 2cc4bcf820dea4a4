"""LLaVA-OneVision: as LLaVA-NeXT, with large grids resized and several pictures seen as their base views."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import ClassVar

from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration, PretrainedConfig

from llava_mcore.batch_fields import Fields
from llava_mcore.errors import ConversionError
from llava_mcore.models.anyres import ONEVISION_FIELDS, AnyRes
from llava_mcore.models.architectures.llava_next import LlavaNext

_ASPECT_RATIO = re.compile(r"anyres_max_(\d+)")


class LlavaOnevision(LlavaNext):
    """LlavaOnevisionForConditionalGeneration."""

    config_class = LlavaOnevisionConfig
    model_class = LlavaOnevisionForConditionalGeneration

    fields: ClassVar[Fields] = ONEVISION_FIELDS

    def anyres(self, hf: PretrainedConfig) -> AnyRes:
        """Return how pictures are cut. Raises ConversionError also where that is not anyres_max_N."""
        found = _ASPECT_RATIO.fullmatch(str(hf.vision_aspect_ratio))
        if found is None:
            raise ConversionError(f"vision_aspect_ratio = {hf.vision_aspect_ratio!r}: expected 'anyres_max_9' or such")
        return replace(super().anyres(hf), max_tiles=int(found[1]), several_as_base=True)
