"""What the training benchmarks run on: Hugging Face folders of published shapes (no weights) and real shards."""

from __future__ import annotations

import gc
import io
import json
import random
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from megatron.energon.flavors import BaseWebdatasetFactory
from PIL import Image, ImageFilter
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
    Qwen2Config,
    SiglipImageProcessor,
    SiglipVisionConfig,
)

from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.architectures.registry import architecture_of

CLIP_L = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
SO400M = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
LLAMA_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_13B = {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 16, "num_attention_heads": 16}
QWEN_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
SHAPES: dict[str, tuple[str, dict[str, int], str, dict[str, int]]] = {
    "llava-1.5-7b": ("clip", CLIP_L, "llama", LLAMA_7B),
    "llava-1.5-13b": ("clip", CLIP_L, "llama", LLAMA_13B),
    "siglip-so400m-qwen2.5-7b": ("siglip", SO400M, "qwen2", QWEN_7B),
    "llava-onevision-7b": ("siglip", SO400M, "qwen2", QWEN_7B),
    "llava-1b": ("clip", CLIP_L, "llama", LLAMA_1B),
    "tiny-onevision": ("siglip", TINY, "qwen2", {**TINY, "num_key_value_heads": 4}),
    "tiny": ("clip", TINY, "llama", TINY),
}
"""Name -> tower and its shape, decoder and its shape. `tiny` is for trying a benchmark on a CPU."""

ONEVISION = ("llava-onevision-7b", "tiny-onevision")
"""Shapes of LlavaOnevisionForConditionalGeneration; the others are LLaVA-1.5's class."""
MIXED_SIZES = ((640, 480), (480, 640), (1024, 768), (500, 333), (1600, 900), (800, 1200))
"""Widths and heights of photographs on the web."""

SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<image>"]
DATASET_YAML = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} ASSISTANT:{% else %}"
    "{% generation %} {{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens: lengths are then known from the text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return chat_tokenizer(tokenizer)


def chat_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Give a tokenizer that holds SPECIAL its special tokens and the chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": "<image>"},
        chat_template=TEMPLATE,
    )


def make_hf_folder(folder: Path, shape: str, *, seq_length: int, num_layers: int | None = None) -> PretrainedConfig:
    """Write config, tokenizer and processor of a published shape; `num_layers` shortens its decoder."""
    tower, vision, decoder, text = SHAPES[shape]
    tokenizer = make_tokenizer()
    image_id = int(tokenizer.convert_tokens_to_ids("<image>"))
    clip = tower == "clip"
    size, patch = (336, 14) if clip else (384, 14)
    vision_config = (CLIPVisionConfig if clip else SiglipVisionConfig)(**vision, image_size=size, patch_size=patch)
    fields: dict[str, Any] = {"vocab_size": 32064, "max_position_embeddings": max(4096, seq_length), **text}
    if num_layers is not None:
        fields["num_hidden_layers"] = num_layers
    text_config = (LlamaConfig if decoder == "llama" else Qwen2Config)(
        **fields, bos_token_id=1, eos_token_id=2, pad_token_id=3, tie_word_embeddings=False
    )
    strategy, features = ("default", (size // patch) ** 2) if clip else ("full", (size // patch) ** 2)
    fields = {
        "vision_config": vision_config,
        "text_config": text_config,
        "image_token_id": image_id,
        "image_token_index": image_id,
        "vision_feature_select_strategy": strategy,
        "tie_word_embeddings": False,
    }
    sizes = {"height": size, "width": size}
    if shape in ONEVISION:
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


def _save(folder: Path, config: PretrainedConfig, *parts: Any) -> PretrainedConfig:
    folder.mkdir(parents=True, exist_ok=True)
    for part in (config, *parts):
        part.save_pretrained(folder)
    return config


def make_weights(folder: Path) -> None:
    """Add random weights in bf16 to a folder of `make_hf_folder`, drawn on a GPU where there is one."""
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        hf = load_hf_config(folder)
        model = architecture_of(hf).model_class._from_config(hf, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    gc.collect()  # its parts refer to each other; the runs that follow need the GPU's memory
    torch.cuda.empty_cache()


def make_jpeg(seed: int, width: int = 640, height: int = 480) -> bytes:
    """Return smooth colored noise as a JPEG of about the size of a photograph's."""
    noise = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).filter(ImageFilter.GaussianBlur(1))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


@dataclass(frozen=True)
class Sample:
    """One conversation with at most one picture."""

    question: str
    answer: str
    picture: bytes | None


def make_shards(
    folder: Path,
    *,
    num_samples: int,
    num_shards: int = 8,
    num_pictures: int = 64,
    sizes: Sequence[tuple[int, int]] = ((640, 480),),
) -> Path:
    """Write and index shards of conversations with lengths like LLaVA's mix: nine of ten with one picture.

    Answers are cut from Python's language reference, which every Python brings: English that a model can learn.
    """
    draw = random.Random(0)
    book = " ".join(" ".join(text.split()) for _, text in sorted(topics.items()))
    pictures = [make_jpeg(number, *sizes[number % len(sizes)]) for number in range(num_pictures)]
    samples = []
    for number in range(num_samples):
        has_picture = draw.random() < 0.9
        length = min(3000, int(draw.lognormvariate(5, 0.8)) + 8)
        place = draw.randrange(len(book) - length)
        answer = book[place : place + length]
        question = "<image>\nWhat is this?" if has_picture else "What is this?"
        samples.append(Sample(question, answer, pictures[number % num_pictures] if has_picture else None))
    return write_shards(folder, samples, num_shards)


def write_shards(folder: Path, samples: Sequence[Sample], num_shards: int) -> Path:
    """Write and index shards of conversations; sample i goes into shard i mod num_shards."""
    folder.mkdir(parents=True)
    for shard in range(num_shards):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for number in range(shard, len(samples), num_shards):
                sample = samples[number]
                messages = [
                    {"role": "user", "content": sample.question},
                    {"role": "assistant", "content": sample.answer},
                ]
                _add(tar, f"{number:08d}.json", json.dumps({"messages": messages}).encode())
                if sample.picture is not None:
                    _add(tar, f"{number:08d}.0.jpg", sample.picture)
    BaseWebdatasetFactory.prepare_dataset(
        str(folder),
        [f"{shard:05d}.tar" for shard in range(num_shards)],
        split_parts_ratio=[("train", 1.0), ("val", 0.0), ("test", 0.0)],
        workers=1,
    )
    (folder / ".nv-meta" / "dataset.yaml").write_text(DATASET_YAML, encoding="utf-8")
    return folder


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
