"""Complete, tiny, random folders of classes beside LLaVA, each with its own processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    PreTrainedModel,
    ProcessorMixin,
)

from tests.helpers.tiny_hf import make_tokenizer, randomise, text_config, vision_config

INTERNVL_TOKENS = {
    "context_image_token": "<IMG_CONTEXT>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "video_token": "<video>",
}


def internvl_processor(*, features_per_tile: int = 4, side: int = 56, **tiles: Any) -> InternVLProcessor:
    """The processor of `make_hf_internvl`. `tiles`: the image processor's min_patches and max_patches."""
    tokenizer = make_tokenizer(named=INTERNVL_TOKENS)
    return InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(size={"height": side, "width": side}, **tiles),
        tokenizer=tokenizer,
        video_processor=InternVLVideoProcessor(size={"height": side, "width": side}),
        image_seq_length=features_per_tile,
        chat_template=tokenizer.chat_template,
    )


def make_hf_internvl(
    folder: Path,
    *,
    vision: str = "internvit",
    text: str = "qwen2",
    tie: bool = False,
    seed: int = 0,
    vision_overrides: dict[str, Any] | None = None,
    text_overrides: dict[str, Any] | None = None,
    **options: Any,
) -> InternVLForConditionalGeneration:
    """Write a whole InternVL folder (4 x 4 patches, 2 x 2 features a tile) and return the model."""
    processor = internvl_processor(max_patches=4)
    config = InternVLConfig(
        vision_config=vision_config(vision, **(vision_overrides or {})),
        text_config=text_config(text, tie_word_embeddings=tie, **(text_overrides or {})),
        image_token_id=processor.image_token_id,
        image_seq_length=4,
        tie_word_embeddings=tie,
        **options,
    )
    return write(InternVLForConditionalGeneration, config, processor, folder, seed)


def write(kind: type[PreTrainedModel], config: Any, processor: ProcessorMixin, folder: Path, seed: int) -> Any:
    """Make a random model and write it with its processor."""
    model = kind._from_config(config).eval()
    randomise(model, seed)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model


MAKERS = {"internvl": make_hf_internvl}
"""By model_type."""
