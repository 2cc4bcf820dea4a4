"""The published shapes that benchmarks run: Hugging Face folders of them, without weights."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaOnevisionConfig,
    LlavaOnevisionImageProcessor,
    LlavaProcessor,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2AudioConfig,
    Qwen2AudioProcessor,
    Qwen2Config,
    Qwen2VLImageProcessor,
    Qwen3_5Config,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    Qwen3VLVideoProcessor,
    SiglipImageProcessor,
    SiglipVisionConfig,
    WhisperFeatureExtractor,
)

from benchmarks.shape_sizes import (
    CLIP_L,
    LLAMA_1B,
    LLAMA_7B,
    LLAMA_13B,
    LLM_JP_1_8B,
    QWEN1_7B,
    QWEN3_5_9B,
    QWEN3_5_VIT,
    QWEN3_8B,
    QWEN3_30B_A3B,
    QWEN3_VL_VIT,
    QWEN_7B,
    QWEN_VIT,
    SO400M,
    TINY,
    TINY_QWEN,
    TINY_QWEN3_5,
    TINY_QWEN3_5_VIT,
    TINY_QWEN3_MOE,
    TINY_QWEN3_VL_VIT,
    TINY_QWEN_VIT,
    TINY_WHISPER,
    WHISPER_LARGE,
)

Size = tuple[int, int]
"""Width and height of an image in pixels."""

AUDIO_SECONDS = (2.0, 16.0)
"""Range of the lengths of clips, drawn uniformly; roughly that of LibriSpeech."""
NO_PICTURES: tuple[Size, ...] = ()
ONE_SIZE: tuple[Size, ...] = ((640, 480),)
PHOTOGRAPHS: tuple[Size, ...] = ((640, 480), (480, 640), (1024, 768), (500, 333), (1600, 900), (768, 1024))
"""Sizes of photographs on the web."""


def random_sizes(shortest: int, longest: int, number: int = 64) -> tuple[Size, ...]:
    """Return sizes whose sides are drawn uniformly between two lengths in pixels; the same ones every time."""
    draw = random.Random(0)
    return tuple((draw.randint(shortest, longest), draw.randint(shortest, longest)) for _ in range(number))


Kind = Literal["llava", "llava_onevision", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen2_audio"]
"""The model_type of a Hugging Face class."""
OF_VIDEOS: tuple[Kind, ...] = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
"""Those whose folders by `make_hf_folder` take videos."""


@dataclass(frozen=True)
class Shape:
    """A tower and a decoder in one of Hugging Face's classes, and the sizes of the images that it is measured on
    (NO_PICTURES: audio clips).

    `vision`, `text`: fields of their configs. `tower`: ignored by classes that have one of their own.
    """

    kind: Kind
    vision: dict[str, Any]
    text: dict[str, Any]
    tower: Literal["clip", "siglip"] = "clip"
    decoder: Literal["llama", "qwen2"] = "llama"
    sizes: tuple[Size, ...] = ONE_SIZE


SHAPES: dict[str, Shape] = {
    "llava-1.5-7b": Shape("llava", CLIP_L, LLAMA_7B),
    "llava-1.5-13b": Shape("llava", CLIP_L, LLAMA_13B),
    "llava-jp-1.8b": Shape("llava", CLIP_L, LLM_JP_1_8B),
    "siglip-so400m-qwen2.5-7b": Shape("llava", SO400M, QWEN_7B, "siglip", "qwen2"),
    "llava-onevision-7b": Shape("llava_onevision", SO400M, QWEN_7B, "siglip", "qwen2", PHOTOGRAPHS),
    "qwen2.5-vl-7b": Shape("qwen2_5_vl", QWEN_VIT, QWEN_7B, sizes=random_sizes(300, 1600)),
    "qwen3-vl-8b": Shape("qwen3_vl", QWEN3_VL_VIT, QWEN3_8B, sizes=random_sizes(300, 1600)),
    "qwen3-vl-30b-a3b": Shape("qwen3_vl_moe", QWEN3_VL_VIT, QWEN3_30B_A3B, sizes=random_sizes(300, 1600)),
    "qwen3.5-9b": Shape("qwen3_5", QWEN3_5_VIT, QWEN3_5_9B, sizes=random_sizes(300, 1600)),
    "qwen2-audio-7b": Shape("qwen2_audio", WHISPER_LARGE, QWEN1_7B, decoder="qwen2", sizes=NO_PICTURES),
    "llava-1b": Shape("llava", CLIP_L, LLAMA_1B),
    "tiny-onevision": Shape("llava_onevision", TINY, TINY_QWEN, "siglip", "qwen2", PHOTOGRAPHS),
    "tiny-qwen2.5-vl": Shape("qwen2_5_vl", TINY_QWEN_VIT, TINY_QWEN, sizes=random_sizes(56, 224)),
    "tiny-qwen3-vl-moe": Shape("qwen3_vl_moe", TINY_QWEN3_VL_VIT, TINY_QWEN3_MOE, sizes=random_sizes(64, 256)),
    "tiny-qwen3.5": Shape("qwen3_5", TINY_QWEN3_5_VIT, TINY_QWEN3_5, sizes=random_sizes(64, 256)),
    "tiny-qwen2-audio": Shape("qwen2_audio", TINY_WHISPER, TINY_QWEN, decoder="qwen2", sizes=NO_PICTURES),
    "tiny": Shape("llava", TINY, TINY),
}
"""Those that begin with `tiny` are for trying a benchmark on a CPU."""

SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<image>"]
QWEN_SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]
AUDIO_SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]
MEDIA_TOKENS = {"<image>": "image_token", "<|image_pad|>": "image_token", "<|video_pad|>": "video_token"}
MEDIA_TOKENS |= {"<|AUDIO|>": "audio_token"}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} ASSISTANT:{% else %}"
    "{% generation %} {{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
QWEN_TEMPLATE = TEMPLATE.replace(
    "USER: {{ m.content }}",
    "USER: {{ m.content | replace('<|image_pad|>', '<|vision_start|><|image_pad|><|vision_end|>')"
    " | replace('<|video_pad|>', '<|vision_start|><|video_pad|><|vision_end|>') }}",
)

AUDIO_TEMPLATE = TEMPLATE.replace(
    "USER: {{ m.content }}",
    "USER: {{ m.content | replace('<|AUDIO|>', '<|audio_bos|><|AUDIO|><|audio_eos|>') }}",
)


def make_tokenizer(special: Sequence[str] = SPECIAL, template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Bytes as tokens: lengths are then known from the text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return chat_tokenizer(tokenizer, special, template)


def chat_tokenizer(
    tokenizer: Tokenizer, special: Sequence[str] = SPECIAL, template: str = TEMPLATE
) -> PreTrainedTokenizerFast:
    """Give a tokenizer that holds `special` those of its tokens that stand for media, and the chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens={MEDIA_TOKENS[token]: token for token in special if token in MEDIA_TOKENS},
        chat_template=template,
    )


def make_hf_folder(folder: Path, name: str, *, seq_length: int, num_layers: int | None = None) -> PretrainedConfig:
    """Write config, tokenizer and processor of a shape; `num_layers` shortens its decoder."""
    shape = SHAPES[name]
    text: dict[str, Any] = {"vocab_size": 32064, "max_position_embeddings": max(4096, seq_length), **shape.text}
    text |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "tie_word_embeddings": False}
    if num_layers is not None:
        text["num_hidden_layers"] = num_layers
    writers = {"qwen2_5_vl": _write_qwen, "qwen2_audio": _write_audio}
    writers |= {"qwen3_vl": _write_qwen3_vl, "qwen3_vl_moe": _write_qwen3_vl, "qwen3_5": _write_qwen3_5}
    return writers.get(shape.kind, _write_llava)(folder, shape, text)


def _write_llava(folder: Path, shape: Shape, text: dict[str, Any]) -> PretrainedConfig:
    """Write a folder of LlavaForConditionalGeneration or LlavaOnevisionForConditionalGeneration."""
    tokenizer = make_tokenizer()
    clip = shape.tower == "clip"
    size, patch = (336, 14) if clip else (384, 14)
    # The published OneVision models have no pooling head; SigLIP's default computes one that nothing reads.
    more: dict[str, Any] = {} if clip else {"vision_use_head": False}
    vision_config: Any = CLIPVisionConfig if clip else SiglipVisionConfig
    strategy, features = ("default" if clip else "full"), (size // patch) ** 2
    image_id = int(tokenizer.convert_tokens_to_ids("<image>"))
    fields: dict[str, Any] = {
        "vision_config": vision_config(**shape.vision, image_size=size, patch_size=patch, **more),
        "text_config": (LlamaConfig if shape.decoder == "llama" else Qwen2Config)(**text),
        "image_token_id": image_id,
        "image_token_index": image_id,
        "vision_feature_select_strategy": strategy,
        "tie_word_embeddings": False,
    }
    sizes = {"height": size, "width": size}
    if shape.kind == "llava_onevision":
        config: Any = LlavaOnevisionConfig(**fields, vision_feature_layer=-1)
        return _save(folder, config, LlavaOnevisionImageProcessor(size=sizes), tokenizer)
    config = LlavaConfig(**fields, vision_feature_layer=-2, image_seq_length=features)
    images: Any = (
        CLIPImageProcessor(size={"shortest_edge": size}, crop_size=sizes) if clip else SiglipImageProcessor(size=sizes)
    )
    processor = LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=patch,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens=1 if clip else 0,
        chat_template=TEMPLATE,
    )
    return _save(folder, config, processor)


def _write_qwen(folder: Path, shape: Shape, text: dict[str, Any]) -> PretrainedConfig:
    """Write a folder of Qwen2_5_VLForConditionalGeneration; its images keep their size, rounded to whole patches."""
    tokenizer = make_tokenizer(QWEN_SPECIAL, QWEN_TEMPLATE)
    head = text["hidden_size"] // text["num_attention_heads"]
    sections = [head // 8, head * 3 // 16, head * 3 // 16]  # 16, 24, 24 of 64 frequencies in the 7B model
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    ids = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        vision_config={**shape.vision, "out_hidden_size": text["hidden_size"]},
        text_config={**text, "rope_parameters": rope},
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    images = Qwen2VLImageProcessor(size={"shortest_edge": 56 * 56, "longest_edge": 1600 * 1600})
    return _save(folder, config, images, tokenizer)


def _write_qwen3_vl(folder: Path, shape: Shape, text: dict[str, Any]) -> PretrainedConfig:
    """Write a folder of Qwen3VL(Moe)ForConditionalGeneration, the latter with experts in every layer."""
    half = text["head_dim"] // 2
    others = half * 5 // 16
    sections = [half - 2 * others, others, others]  # 24, 20, 20 of 64 frequencies in the 30B model
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": sections, "mrope_interleaved": True}
    config_class = Qwen3VLMoeConfig if shape.kind == "qwen3_vl_moe" else Qwen3VLConfig
    return _write_qwen3(folder, config_class, shape, {**text, "rope_parameters": rope})


def _write_qwen3_5(folder: Path, shape: Shape, text: dict[str, Any]) -> PretrainedConfig:
    """Write a folder of Qwen3_5ForConditionalGeneration: three delta nets, then attention that rotates a quarter of
    each head."""
    half = text["head_dim"] // 8
    sections = [(half + 2) // 3, (half + 1) // 3, half // 3]  # 11, 11, 10 of 32 frequencies in the 9B model
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    rope |= {"mrope_section": sections, "mrope_interleaved": True}
    return _write_qwen3(folder, Qwen3_5Config, shape, {**text, "rope_parameters": rope})


def _write_qwen3(
    folder: Path, config_class: type[PretrainedConfig], shape: Shape, text: dict[str, Any]
) -> PretrainedConfig:
    """Write a folder whose images keep their size, rounded to whole patches of 16 pixels."""
    tokenizer = make_tokenizer(QWEN_SPECIAL, QWEN_TEMPLATE)
    ids = tokenizer.convert_tokens_to_ids
    config = config_class(
        vision_config={**shape.vision, "out_hidden_size": text["hidden_size"]},
        text_config=text,
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    images = Qwen2VLImageProcessor(
        size={"shortest_edge": 64 * 64, "longest_edge": 1600 * 1600},
        patch_size=16,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    videos = Qwen3VLVideoProcessor(size={"shortest_edge": 64 * 64, "longest_edge": 6 * 2048 * 2048})  # as released
    return _save(folder, config, images, videos, tokenizer)


def _write_audio(folder: Path, shape: Shape, text: dict[str, Any]) -> PretrainedConfig:
    """Write a folder of Qwen2AudioForConditionalGeneration, which takes 30 seconds in 128 mel bins."""
    tokenizer = make_tokenizer(AUDIO_SPECIAL, AUDIO_TEMPLATE)
    config = Qwen2AudioConfig(
        audio_config={**shape.vision, "model_type": "qwen2_audio_encoder", "num_mel_bins": 128},
        text_config={**text, "model_type": "qwen2"},
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    extractor = WhisperFeatureExtractor(feature_size=128)
    return _save(folder, config, Qwen2AudioProcessor(extractor, tokenizer, chat_template=AUDIO_TEMPLATE))


def _save(folder: Path, config: PretrainedConfig, *parts: Any) -> PretrainedConfig:
    folder.mkdir(parents=True, exist_ok=True)
    for part in (config, *parts):
        part.save_pretrained(folder)
    return config
