"""Complete, tiny, random Hugging Face LLaVA folders: every vision tower with every language model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    Dinov2Config,
    Dinov2WithRegistersConfig,
    Gemma2Config,
    Gemma3TextConfig,
    InternVLVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    LlavaProcessor,
    MistralConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SiglipImageProcessor,
    SiglipVisionConfig,
)

PATCH = 14
TEXTS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "phi3": Phi3Config,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
}
TEXTS_WITH_EXPERTS = {"qwen3_moe": Qwen3MoeConfig}
VISIONS = {
    "clip": CLIPVisionConfig,
    "siglip": SiglipVisionConfig,
    "dinov2": Dinov2Config,
    "dinov2_with_registers": Dinov2WithRegistersConfig,
    "internvit": InternVLVisionConfig,
}

CORPUS = [
    "USER: What is this? ASSISTANT: This is a picture of a small red house.",
    "Which digit is shown? It is seven. Is it even? no. yes. 0 1 2 3 4 5 6 7 8 9",
    "The quick brown fox jumps over the lazy dog; 漢字とかな。",
]

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}USER: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>\n{% elif p.type == 'video' %}<video>\n"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %} ASSISTANT:{% else %}{% generation %} {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{{ eos_token }}"
    "{% endgeneration %}{% endif %}{% endfor %}"
)


def make_tokenizer(
    vocab_size: int = 400, named: dict[str, str] | None = None, more: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Byte-level BPE with <s>, </s>, <pad> and the placeholder; deterministic.

    named: special tokens that the tokenizer knows by a name, the placeholder first; None: <image>. more: others.
    """
    named = named or {"image_token": "<image>"}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<unk>", "<s>", "</s>", "<pad>", *named.values(), *more]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=named,
        chat_template=CHAT_TEMPLATE.replace("<image>", next(iter(named.values()))),
    )


def vision_config(kind: str, **overrides: Any) -> Any:
    """4 layers, 64 wide; SigLIP's image (60) is not a multiple of the patch (14), as in so400m-patch14-384."""
    base: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "patch_size": PATCH,
        "image_size": 60 if kind == "siglip" else 56,
    }
    if kind in ("dinov2", "dinov2_with_registers"):
        base |= {"mlp_ratio": 2}
        del base["intermediate_size"]
    if kind == "internvit":
        base |= {"attention_bias": True}
    return VISIONS[kind](**(base | overrides))


def text_config(kind: str, **overrides: Any) -> Any:
    """4 layers, 64 wide, 8 heads in 4 groups (2 for llama's GQA at tp 4 would not divide)."""
    base: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 401,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }
    if kind in ("qwen3", "qwen3_moe"):
        base["head_dim"] = 16
    if kind == "qwen3_moe":  # the second layer has a plain MLP
        base |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True}
        base["mlp_only_layers"] = [1]
    if kind == "mistral":
        base |= {"sliding_window": None, "head_dim": 8}
    if kind in ("gemma2", "gemma3"):  # a window that cuts, every second layer
        base |= {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 9}
        num_layers = overrides.get("num_hidden_layers", base["num_hidden_layers"])
        base["layer_types"] = ["sliding_attention", "full_attention"] * (num_layers // 2)
    return {**TEXTS, **TEXTS_WITH_EXPERTS}[kind](**(base | overrides))


def _pinpoints(side: int) -> list[list[int]]:
    return [[side * rows, side * columns] for rows, columns in ((1, 2), (2, 1), (2, 2), (1, 3), (3, 1))]


@dataclass(frozen=True)
class _Kind:
    """The classes of an architecture, what its config has beside LLaVA's, and the tokens that its tokenizer names."""

    config: Any
    model: Any
    processor: Any
    options: Callable[[int], dict[str, Any]] = lambda side: {}
    tokens: dict[str, str] | None = None


ARCHITECTURES = {
    "llava": _Kind(LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor),
    "llava_next": _Kind(
        LlavaNextConfig,
        LlavaNextForConditionalGeneration,
        LlavaNextProcessor,
        lambda side: {"image_grid_pinpoints": _pinpoints(side)},
    ),
    "llava_onevision": _Kind(
        LlavaOnevisionConfig,
        LlavaOnevisionForConditionalGeneration,
        LlavaOnevisionProcessor,
        lambda side: {"image_grid_pinpoints": _pinpoints(side), "vision_aspect_ratio": "anyres_max_1"},
        {"image_token": "<image>", "video_token": "<video>"},
    ),
}


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Make every tensor non-trivial (biases and norms too), so that a swap or a transposition shows."""
    zero_centred = {
        id(p)
        for x in model.modules()
        if type(x).__name__.startswith("Gemma") or type(x).__name__ in ("Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm")
        for p in x.parameters(recurse=False)
    }
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            noise = torch.randn(p.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                p.copy_((0.0 if id(p) in zero_centred else 1.0) + 0.1 * noise)
            elif "lambda" in name:  # layer scale
                p.copy_(0.5 + 0.2 * noise)
            elif p.ndim == 1:
                p.copy_(0.1 * noise)
            elif "conv1d" in name:  # of a few values, whose sum would be tiny
                p.copy_(0.5 * noise)
            else:
                p.copy_(0.08 * noise)


def make_hf_llava(
    folder: Path,
    *,
    vision: str = "clip",
    text: str = "llama",
    tie: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    strategy: str | None = None,
    feature_layer: int | list[int] = -2,
    architecture: str = "llava",
    model_overrides: dict[str, Any] | None = None,
    text_overrides: dict[str, Any] | None = None,
    vision_overrides: dict[str, Any] | None = None,
) -> Any:
    """Write a whole HF folder (model, tokenizer, processor, chat template) and return the model."""
    kind = ARCHITECTURES[architecture]
    tokenizer = make_tokenizer(named=kind.tokens)
    v = vision_config(vision, **(vision_overrides or {}))
    t = text_config(text, tie_word_embeddings=tie, **(text_overrides or {}))
    strategy = strategy or ("full" if vision == "siglip" else "default")
    side, patch = v.image_size, v.patch_size
    if vision == "internvit":
        side, patch = side[0], patch[0]
    before = {"siglip": 0, "dinov2_with_registers": 5}.get(vision, 1)
    tokens = (side // patch) ** 2 + before - (1 if strategy == "default" else 0)
    videos = {"video_token_id": tokenizer.convert_tokens_to_ids("<video>")} if kind.tokens else {}
    config = kind.config(
        vision_config=v,
        text_config=t,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=feature_layer,
        vision_feature_select_strategy=strategy,
        image_seq_length=tokens,
        tie_word_embeddings=tie,
        **(kind.options(side) | videos | (model_overrides or {})),
    )
    # Of the attentions in transformers only this one caps scores, as Gemma 2 asks for.
    capped = {"attn_implementation": "eager"} if text == "gemma2" else {}
    model = kind.model._from_config(config, **capped).eval()
    randomise(model, seed)
    model = model.to(dtype)
    size = {"height": side, "width": side}
    image_processor: Any = (
        SiglipImageProcessor(size=size)
        if vision == "siglip"
        else CLIPImageProcessor(size={"shortest_edge": side}, crop_size=size)
    )
    if architecture == "llava_next":
        cropped = {"size": {"shortest_edge": side}, "crop_size": size}
        image_processor = LlavaNextImageProcessor(**cropped, image_grid_pinpoints=config.image_grid_pinpoints)
    if architecture == "llava_onevision":
        image_processor = LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=config.image_grid_pinpoints)
        processor: Any = LlavaOnevisionProcessor(
            image_processor=image_processor,
            tokenizer=tokenizer,
            video_processor=LlavaOnevisionVideoProcessor(size=size),
            num_image_tokens=tokens,
            vision_feature_select_strategy=strategy,
            vision_aspect_ratio=config.vision_aspect_ratio,
            chat_template=CHAT_TEMPLATE,
        )
        return _saved(folder, model, processor)
    processor = kind.processor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=patch,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens=before,
        chat_template=CHAT_TEMPLATE,
    )
    return _saved(folder, model, processor)


def make_onevision(folder: Path) -> Path:
    """Write the LLaVA-OneVision folder that the tests of videos share, and return it."""
    make_hf_llava(folder, architecture="llava_onevision", vision="siglip", text="qwen2", feature_layer=-1)
    return folder


def _saved(folder: Path, model: Any, processor: Any) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model
