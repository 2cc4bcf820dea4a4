"""Complete, tiny, random folders of classes beside LLaVA, each with its own processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import (
    GotOcr2ImageProcessor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    PreTrainedModel,
    ProcessorMixin,
    SmolVLMForConditionalGeneration,
    SmolVLMVideoProcessor,
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
    """Write a whole InternVL folder (4 x 4 patches, 2 x 2 features per tile) and return the model."""
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


def idefics3_processor(*, features_per_tile: int = 4, side: int = 56, marks: bool = True) -> Idefics3Processor:
    """The processor of `make_hf_idefics3`: at most 3 tiles per side. `marks`: whether the tiles' are single tokens."""
    rows = [f"<row_{i + 1}_col_{j + 1}>" for i in range(3) for j in range(3)] if marks else []
    tokenizer = make_tokenizer(more=["<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *rows])
    return Idefics3Processor(
        image_processor=Idefics3ImageProcessor(size={"longest_edge": 3 * side}, max_image_size={"longest_edge": side}),
        tokenizer=tokenizer,
        image_seq_len=features_per_tile,
        chat_template=tokenizer.chat_template,
    )


def make_hf_idefics3(
    folder: Path,
    *,
    vision: str = "siglip",
    text: str = "llama",
    tie: bool = False,
    seed: int = 0,
    marks: bool = True,
    vision_overrides: dict[str, Any] | None = None,
    text_overrides: dict[str, Any] | None = None,
) -> Idefics3ForConditionalGeneration:
    """Write a whole Idefics3 folder (4 x 4 patches, 2 x 2 features per tile) and return the model."""
    assert vision == "siglip", "the only tower of the class"
    processor = idefics3_processor(marks=marks)
    config = Idefics3Config(
        vision_config=without_type(vision_config(vision, image_size=56, **(vision_overrides or {}))),
        text_config=text_config(text, tie_word_embeddings=tie, **(text_overrides or {})),
        image_token_id=processor.image_token_id,
        pad_token_id=3,
        tie_word_embeddings=tie,
    )
    return write(Idefics3ForConditionalGeneration, config, processor, folder, seed)


def make_hf_smolvlm(folder: Path, **options: Any) -> SmolVLMForConditionalGeneration:
    """Write a whole SmolVLM folder as `make_hf_idefics3` does, with SmolVLM's own image processor."""
    make_hf_idefics3(folder, **options)
    values = json.loads((folder / "config.json").read_text()) | {"model_type": "smolvlm"}
    values["vision_config"]["model_type"] = "smolvlm_vision"
    processor = json.loads((folder / "processor_config.json").read_text()) | {"processor_class": "SmolVLMProcessor"}
    processor["image_processor"]["image_processor_type"] = "SmolVLMImageProcessor"
    processor["video_processor"] = SmolVLMVideoProcessor().to_dict()
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return SmolVLMForConditionalGeneration.from_pretrained(folder).eval()


def without_type(config: Any) -> dict[str, Any]:
    """Return a tower's values for a class that gives it a name of its own."""
    return {key: value for key, value in config.to_dict().items() if key != "model_type"}


MAKERS = {"internvl": make_hf_internvl, "idefics3": make_hf_idefics3, "smolvlm": make_hf_smolvlm}
"""By model_type."""
