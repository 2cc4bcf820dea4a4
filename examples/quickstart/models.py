"""The two models that the quickstart starts from, with random weights: a small Llama and a small CLIP tower.

Sizes divide by tensor parallel 2 and pipeline parallel 2. The tokenizer is a SentencePiece model, trained here.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import sentencepiece
import torch
from questions import corpus
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaTokenizer,
)

SEED = 0
VOCAB_SIZE = 200
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}USER: {{ message['content'] }}"
    "{% else %} ASSISTANT:{% generation %} {{ message['content'] }}{{ eos_token }}{% endgeneration %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %} ASSISTANT:{% endif %}"
)


def make_tokenizer(folder: Path) -> LlamaTokenizer:
    """Train a SentencePiece tokenizer on every question and answer, and save it as Llama's."""
    folder.mkdir(parents=True, exist_ok=True)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["USER: ASSISTANT:", *corpus()]),
        model_writer=model,
        vocab_size=VOCAB_SIZE,
        hard_vocab_limit=False,
        model_type="bpe",
        character_coverage=1.0,
        byte_fallback=False,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "add_eos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = LlamaTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_language_model(folder: Path) -> int:
    """Write the Llama folder (config, weights, tokenizer) and return its number of parameters."""
    tokenizer = make_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.05,
    )
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model.num_parameters()


def make_vision_tower(folder: Path, image_size: int) -> int:
    """Write the CLIP folder (config, weights, image processor) and return its number of parameters."""
    config = CLIPVisionConfig(
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=4,  # LLaVA takes the output of the last layer but one
        num_attention_heads=4,
        image_size=image_size,
        patch_size=image_size // 2,
        initializer_factor=2.0,
    )
    torch.manual_seed(SEED + 1)
    model = CLIPVisionModel(config)
    model.save_pretrained(folder)
    size = {"height": image_size, "width": image_size}
    CLIPImageProcessor(size={"shortest_edge": image_size}, crop_size=size).save_pretrained(folder)
    return model.num_parameters()
