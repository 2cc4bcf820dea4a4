"""Tiny language models and vision towers as a user would bring them to build_llava_jp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPImageProcessor,
    CLIPModel,
    PreTrainedTokenizerFast,
    SiglipImageProcessor,
    SiglipModel,
)

from llava_mcore.models.vision.features import image_side
from tests.helpers.tiny_hf import CORPUS, randomise, text_config, vision_config

VOCAB = 401
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '</s>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_text_tokenizer(*, size: int = 350, template: str | None = CHATML, **special: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE as a text model brings it: no <image>, and no pad token unless given."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    known = ["<unk>", "<s>", "</s>", "<|im_start|>"]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=known, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text for text in CORPUS for _ in range(2)], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **({"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"} | special)
    )
    fast.chat_template = template
    return fast


def save_text(
    folder: Path,
    kind: str = "llama",
    *,
    tie: bool = False,
    dtype: torch.dtype = torch.float32,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **overrides: Any,
) -> Path:
    """Write a tiny random language model (64 wide, 2 layers, vocabulary 401) with its tokenizer."""
    config = text_config(kind, tie_word_embeddings=tie, **({"num_hidden_layers": 2, "pad_token_id": None} | overrides))
    model = AutoModelForCausalLM.from_config(config)
    randomise(model, seed=3)
    model.to(dtype).save_pretrained(folder)
    (tokenizer or make_text_tokenizer()).save_pretrained(folder)
    return folder


def save_vision(folder: Path, kind: str, *, whole: bool = False) -> Path:
    """Write a tiny random tower, or (`whole`) a model with a text encoder around it, and its image processor."""
    config = vision_config(kind, num_hidden_layers=3)
    model = AutoModel.from_config(config)
    if whole:
        encoder = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        family = CLIPModel if kind == "clip" else SiglipModel
        values = {"text_config": encoder | {"vocab_size": 40}, "vision_config": config.to_dict()}
        model = family(family.config_class(**values))
    randomise(model, seed=4)
    model.save_pretrained(folder)
    save_image_processor(folder, kind, image_side(config))
    return folder


def save_image_processor(folder: Path, kind: str, pixels: int) -> None:
    size = {"height": pixels, "width": pixels}
    if kind != "siglip":
        CLIPImageProcessor(size={"shortest_edge": pixels}, crop_size=size).save_pretrained(folder)
    else:
        SiglipImageProcessor(size=size).save_pretrained(folder)


def load(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder).eval()


def tensors_of(folder: Path, part: str) -> dict[str, torch.Tensor]:
    """Tensors in the files whose name holds `part`."""
    return {k: v for f in folder.glob("*.safetensors") for k, v in load_file(f).items() if part in k}
