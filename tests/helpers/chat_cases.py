"""Real and tiny tokenizers for chat templates, and a conversation as Hugging Face takes it."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from llava_mcore.build.language import load_tokenizer
from llava_mcore.build.sources import find_source
from llava_mcore.data.samples import IMAGE_MARK, Turn
from llava_mcore.templates.named import SPECIAL_TOKENS
from tests.helpers.smollm2 import smollm2_folder
from tests.helpers.tiny_hf import CORPUS, make_tokenizer

EOS = {"chatml": "<|im_end|>", "llama-3": "<|eot_id|>"}
"""How a family's own tokenizers end an answer; </s> with the others."""


def sentencepiece_like(prefix: str) -> PreTrainedTokenizerFast:
    """BPE with byte fallback that turns spaces into ▁, as Llama's; it puts BOS before every text."""
    alphabet = sorted(set("".join(CORPUS)) - set("漢字とかな ") | {"▁", "\n"})
    vocab = {t: i for i, t in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *alphabet])}
    merges = [("i", "s"), ("▁", "is"), ("▁", "t"), ("h", "e"), ("▁t", "he")]
    vocab |= {a + b: len(vocab) + i for i, (a, b) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if prefix == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def trimmed_byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE whose offsets leave spaces out, as GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def tiny(name: str) -> PreTrainedTokenizerFast:
    """A tiny tokenizer that has all special tokens of the template `name`, as its family's own do."""
    tokenizer = make_tokenizer()
    if name in SPECIAL_TOKENS:
        tokenizer.add_tokens(list(SPECIAL_TOKENS[name]), special_tokens=True)
        tokenizer.eos_token = EOS[name]
    return tokenizer


def bare(make: Callable[[], PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    """A tokenizer that knows no template's special tokens, only `<image>`."""
    tokenizer = make()
    tokenizer.add_tokens([IMAGE_MARK], special_tokens=True)
    return tokenizer


def smollm2() -> PreTrainedTokenizerFast | None:
    """SmolLM2's tokenizer (byte level, <|im_end|> is EOS); None if its package is not installed."""
    folder = smollm2_folder()
    return None if folder is None else load_tokenizer(find_source(str(folder), "--tokenizer", may_be_gguf=True), {})


def mistral_v1(folder: Path) -> PreTrainedTokenizerFast | None:
    """Mistral's first tokenizer (SentencePiece); None if mistral-common is not installed."""
    spec = importlib.util.find_spec("mistral_common")
    if spec is None or spec.origin is None:
        return None
    shutil.copy(Path(spec.origin).parent / "data" / "tokenizer.model.v1", folder / "tokenizer.model")
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False}
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | special))
    return AutoTokenizer.from_pretrained(folder)


TINY: dict[str, Callable[[str], PreTrainedTokenizerFast]] = {
    "its own tokens": tiny,
    "trimmed": lambda name: bare(trimmed_byte_level),
    "prepend": lambda name: bare(lambda: sentencepiece_like("prepend")),
    "metaspace": lambda name: bare(lambda: sentencepiece_like("first")),
}


def typed(text: str) -> list[dict[str, str]]:
    """A turn's text as parts, a line break beside an image being left to the template."""
    parts: list[dict[str, str]] = []
    for i, piece in enumerate(text.split(IMAGE_MARK)):
        piece = piece.removeprefix("\n") if i else piece
        piece = piece.removesuffix("\n") if i < text.count(IMAGE_MARK) else piece
        parts += [{"type": "image"}] if i else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def messages(turns: Sequence[Turn], *, as_parts: bool = False) -> list[dict[str, Any]]:
    """Turns as `apply_chat_template` takes them."""
    return [{"role": t.role, "content": typed(t.text) if as_parts else t.text} for t in turns]
