"""Tiny folders of LLaVA, InternVL and Idefics, and the table of all classes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers as hf

from llava_mcore.build.tiny.mllama import write_mllama
from llava_mcore.build.tiny.parts import (
    PAD,
    PATCH,
    SIDE,
    chat_template,
    make_tokenizer,
    text_values,
    tower_values,
    write,
)
from llava_mcore.build.tiny.qwen import write_qwen2_audio, write_qwen_vl
from llava_mcore.models.architectures.registry import architecture_of

_SQUARE = {"height": SIDE, "width": SIDE}
_GRIDS = [[SIDE * rows, SIDE * columns] for rows, columns in ((1, 2), (2, 1), (2, 2), (1, 3), (3, 1))]
_IMAGE, _VIDEO = {"image_token": "<image>"}, {"video_token": "<video>"}
_FAKE = "<fake_token_around_image>"


def write_tiny(name: str, folder: Path, seed: int) -> None:
    """Write a folder of a class. `name`: its model_type, such as qwen2_5_vl."""
    _WRITERS[name](name, folder, seed)


def _write_llava(name: str, folder: Path, seed: int) -> None:
    """LLaVA and LLaVA-NeXT: CLIP and Llama."""
    tokenizer = make_tokenizer(_IMAGE)
    cropped: dict[str, Any] = {"size": {"shortest_edge": SIDE}, "crop_size": _SQUARE}
    grids = {"image_grid_pinpoints": _GRIDS} if name == "llava_next" else {}
    if name == "llava_next":
        processor_class, images = hf.LlavaNextProcessor, hf.LlavaNextImageProcessor(**cropped, **grids)
    else:
        processor_class, images = hf.LlavaProcessor, hf.CLIPImageProcessor(**cropped)
    processor = processor_class(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chat_template({"image": "<image>\n"}),
    )
    config = hf.CONFIG_MAPPING[name](
        vision_config={"model_type": "clip_vision_model", **tower_values()},
        text_config={"model_type": "llama", **text_values(tokenizer)},
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        **_llava_values(tokenizer),
        **grids,
    )
    write(architecture_of(config).model_class, config, processor, folder, seed)


def _llava_values(tokenizer: hf.PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return what the configs of all LLaVA classes have."""
    image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    return {
        "image_token_id": image_token_id,
        "image_token_index": image_token_id,
        "image_seq_length": (SIDE // PATCH) ** 2,
        "tie_word_embeddings": False,
    }


def _write_llava_onevision(name: str, folder: Path, seed: int) -> None:
    """SigLIP and Qwen2; images of up to 3 tiles and the whole image, and videos."""
    tokenizer = make_tokenizer(_IMAGE | _VIDEO)
    processor = hf.LlavaOnevisionProcessor(
        image_processor=hf.LlavaOnevisionImageProcessor(size=_SQUARE, image_grid_pinpoints=_GRIDS),
        tokenizer=tokenizer,
        video_processor=hf.LlavaOnevisionVideoProcessor(size=_SQUARE),
        num_image_tokens=(SIDE // PATCH) ** 2,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_1",
        chat_template=chat_template({"image": "<image>\n", "video": "<video>\n"}),
    )
    config = hf.LlavaOnevisionConfig(
        vision_config={"model_type": "siglip_vision_model", **tower_values()},
        text_config={"model_type": "qwen2", **text_values(tokenizer)},
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_1",
        image_grid_pinpoints=_GRIDS,
        video_token_id=tokenizer.convert_tokens_to_ids("<video>"),
        **_llava_values(tokenizer),
    )
    write(architecture_of(config).model_class, config, processor, folder, seed)


def _write_internvl(name: str, folder: Path, seed: int) -> None:
    """InternViT and Qwen2; images of up to 4 tiles."""
    tokens = {"context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>"}
    tokenizer = make_tokenizer(tokens | _VIDEO)
    processor = hf.InternVLProcessor(
        image_processor=hf.GotOcr2ImageProcessor(size=_SQUARE, max_patches=4),
        tokenizer=tokenizer,
        video_processor=hf.InternVLVideoProcessor(size=_SQUARE),
        image_seq_length=4,
        chat_template=chat_template({"image": "<IMG_CONTEXT>\n", "video": "<video>\n"}),
    )
    config = hf.InternVLConfig(
        vision_config={**tower_values(), "attention_bias": True},
        text_config={"model_type": "qwen2", **text_values(tokenizer)},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    write(architecture_of(config).model_class, config, processor, folder, seed)


def _write_idefics2(name: str, folder: Path, seed: int) -> None:
    """SigLIP for images of any size, a perceiver, and Mistral."""
    tokenizer = make_tokenizer({**_IMAGE, "image_boundary_token": _FAKE}, more=["<end_of_utterance>"])
    processor = hf.Idefics2Processor(
        image_processor=hf.Idefics2ImageProcessor(
            size={"shortest_edge": 2 * PATCH, "longest_edge": 6 * PATCH}, do_image_splitting=False
        ),
        tokenizer=tokenizer,
        image_seq_len=6,
        chat_template=chat_template({"image": "<image>"}),
    )
    text = {"model_type": "mistral", **text_values(tokenizer), "sliding_window": None, "head_dim": 8}
    config = hf.Idefics2Config(
        vision_config=tower_values(),
        perceiver_config={
            "hidden_size": text["hidden_size"],
            "resampler_n_latents": 6,
            "resampler_depth": 2,
            "resampler_n_heads": 4,
            "resampler_head_dim": 24,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
        },
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
    )
    write(architecture_of(config).model_class, config, processor, folder, seed)


def _write_idefics3(name: str, folder: Path, seed: int) -> None:
    """Idefics3 and SmolVLM: SigLIP and Llama; images of up to 3 x 3 tiles and the whole image."""
    rows = [f"<row_{i + 1}_col_{j + 1}>" for i in range(3) for j in range(3)]
    tokenizer = make_tokenizer(_IMAGE, more=[_FAKE, "<end_of_utterance>", "<global-img>", *rows])
    processor = hf.Idefics3Processor(
        image_processor=hf.Idefics3ImageProcessor(
            size={"longest_edge": 3 * SIDE}, max_image_size={"longest_edge": SIDE}
        ),
        tokenizer=tokenizer,
        image_seq_len=4,
        chat_template=chat_template({"image": "<image>"}),
    )
    config = hf.CONFIG_MAPPING[name](
        vision_config=tower_values(),
        text_config={"model_type": "llama", **text_values(tokenizer)},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=PAD,
        tie_word_embeddings=False,
    )
    write(architecture_of(config).model_class, config, processor, folder, seed)
    if name == "smolvlm":  # its processor's class needs a package for videos, its file does not
        file = folder / "processor_config.json"
        values = json.loads(file.read_text(encoding="utf-8")) | {"processor_class": "SmolVLMProcessor"}
        values["image_processor"]["image_processor_type"] = "SmolVLMImageProcessor"
        values["video_processor"] = hf.SmolVLMVideoProcessor().to_dict()
        file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


_WRITERS: dict[str, Callable[[str, Path, int], None]] = {
    **dict.fromkeys(("llava", "llava_next"), _write_llava),
    "llava_onevision": _write_llava_onevision,
    "internvl": _write_internvl,
    "idefics2": _write_idefics2,
    **dict.fromkeys(("idefics3", "smolvlm"), _write_idefics3),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), write_qwen_vl),
    "qwen2_audio": write_qwen2_audio,
    "mllama": write_mllama,
}
"""By model_type; a test compares them with the supported classes."""
