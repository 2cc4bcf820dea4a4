"""What the products read: a Hugging Face folder with Qwen's own token ids and random weights, JPEGs and JSON lines.

The sizes are those of `benchmarks/shapes.py`, the conversations those of `benchmarks/material.py`: the same images and
texts in the same order as in our shards. Only the ids of tokens differ, which products have built in.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from benchmarks.material import Sample, conversations, make_weights
from benchmarks.peers.tokens import FIRST_SPECIAL, PAD, SPECIAL
from benchmarks.shapes import SHAPES, make_hf_folder

NUM_EMBEDDINGS = 151936
"""At least, so that the ids are in range in tiny shapes too."""
TEMPLATE = (  # Qwen2.5-VL's, without the parts for videos and numbered images
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou are a helpful assistant."
    "<|im_end|>\n{% endif %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Classes of Hugging Face whose folders can be made."""
SMALL_IMAGE = 6
"""Tokens of the white image that NeMo Automodel adds to a conversation without one."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens, as in `benchmarks/shapes.py`, with Qwen's special tokens under Qwen's ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(alphabet)}
    vocab |= {token: FIRST_SPECIAL + number for number, token in enumerate(SPECIAL)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token=PAD, chat_template=TEMPLATE
    )


def make_peer_folder(folder: Path, shape: str, *, seq_length: int, layers: int | None, weights: bool = True) -> None:
    """Write config, tokenizer, processor and, unless told otherwise, random weights in bf16."""
    if SHAPES[shape].kind not in KINDS:
        raise SystemExit(f"{shape}: folders for the products can be made of {', '.join(KINDS)} alone")
    make_hf_folder(folder, shape, seq_length=seq_length, num_layers=layers)
    tokenizer = make_tokenizer()
    config: Any = AutoConfig.from_pretrained(folder)
    for name in ("image", "video"):
        setattr(config, f"{name}_token_id", tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>"))
    for name in ("start", "end"):
        setattr(config, f"vision_{name}_token_id", tokenizer.convert_tokens_to_ids(f"<|vision_{name}|>"))
    text = config.text_config
    text.vocab_size = max(text.vocab_size, NUM_EMBEDDINGS)
    text.bos_token_id = text.pad_token_id = tokenizer.convert_tokens_to_ids(PAD)
    text.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    text.max_position_embeddings = 32768
    config.architectures = [f"{_class_prefix(shape)}ForConditionalGeneration"]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    images = Qwen2VLImageProcessor.from_pretrained(folder)
    if SHAPES[shape].kind == "qwen2_5_vl":
        processor: Any = Qwen2_5_VLProcessor(images, tokenizer, Qwen2VLVideoProcessor(), chat_template=TEMPLATE)
    else:
        processor = Qwen3VLProcessor(images, tokenizer, Qwen3VLVideoProcessor(), chat_template=TEMPLATE)
    processor.save_pretrained(folder)
    if weights:
        make_weights(folder)


def _class_prefix(shape: str) -> str:
    return {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "qwen3_vl_moe": "Qwen3VLMoe"}[SHAPES[shape].kind]


def make_lists(folder: Path, shape: str, num_samples: int) -> None:
    """Write the images, and the conversations in the form that each product reads."""
    images = folder / "images"
    images.mkdir(parents=True)
    files: dict[bytes, Path] = {}
    tokenizer = make_tokenizer()
    lists: dict[str, list[dict[str, Any]]] = {"swift": [], "lmms": [], "automodel": [], "veomni": []}
    for sample in conversations(num_samples, SHAPES[shape].sizes):
        file = None
        if sample.picture is not None:
            file = files.setdefault(sample.picture, images / f"{len(files):04d}.jpg")
            if not file.exists():
                file.write_bytes(sample.picture)
        lists["swift"].append(_swift_line(sample, file))
        lists["lmms"].append(_openai_line(sample, file))
        lists["automodel"].append(_automodel_line(sample, file, tokenizer))
        lists["veomni"].append(_sharegpt_line(sample, file))
    (folder / "automodel.json").write_text('{"conversations": {"file_name": "automodel.jsonl"}}', encoding="utf-8")
    for name, lines in lists.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def _swift_line(sample: Sample, image: Path | None) -> dict[str, Any]:
    """ms-swift's standard form: <image> in the text, and the files beside it."""
    question = sample.question.replace("<image>\n", "<image>")
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": sample.answer}]
    return {"messages": messages, "images": [] if image is None else [str(image)]}


def _openai_line(sample: Sample, image: Path | None) -> dict[str, Any]:
    """OpenAI's form, which lmms-engine reads."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": sample.question.replace("<image>\n", "")}]
    if image is not None:
        parts.insert(0, {"type": "image_url", "image_url": {"url": str(image)}})
    answer = [{"type": "text", "text": sample.answer}]
    return {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]}


def _automodel_line(sample: Sample, image: Path | None, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """NeMo Automodel's form, with the sizes that its scripts/precompute_tokens.py adds, so that it packs exactly."""
    line = _swift_line(sample, image)
    parts = [*_openai_line(sample, image)["messages"]]
    length = len(tokenizer.apply_chat_template(parts, tokenize=True, return_dict=False))
    if image is None or sample.picture is None:
        return line | {"_text_tokens": length + SMALL_IMAGE}
    with Image.open(io.BytesIO(sample.picture)) as opened:
        sizes = [[opened.height, opened.width]]
    return line | {"_text_tokens": length - 1, "mm_inputs_meta": {"images_meta": sizes}}


def _sharegpt_line(sample: Sample, image: Path | None) -> dict[str, Any]:
    """ShareGPT's form, which VeOmni reads; `source` names the one of its preprocessors that keeps the text."""
    turns = [{"from": "human", "value": sample.question}, {"from": "gpt", "value": sample.answer}]
    return {"conversations": turns, "images": [] if image is None else [str(image)], "source": "sharegpt4v_sft"}
