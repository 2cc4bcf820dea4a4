"""Parts of tiny folders: a tokenizer, a chat template, a language model's config, random weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNorm

PATCH = 14
SIDE = 4 * PATCH
"""Pixels of an image's side, for towers that take images of one size."""
MAX_TOKENS = 4096
SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")
BOS, EOS, PAD = 1, 2, 3
"""Ids of the special tokens."""
_VOCAB_SIZE = 400
_CENTERED = (Qwen3_5RMSNorm, Qwen3_5MoeRMSNorm)
_CORPUS = (
    "USER: What is this? ASSISTANT: This is a picture of a small red house.",
    "Which digit is shown? It is seven. Is it even? no. yes. 0 1 2 3 4 5 6 7 8 9",
    "The quick brown fox jumps over the lazy dog.",
)
_TEXT_OF = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
)


def make_tokenizer(named: Mapping[str, str], more: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer, which reads every text. It is always the same.

    Args:
        named: special tokens that the tokenizer knows by a name.
        more: other special tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=[*SPECIAL, *named.values(), *more],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    unk, bos, eos, pad = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=unk,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        extra_special_tokens=dict(named),
    )


def chat_template(marks: Mapping[str, str]) -> str:
    """Return a chat template: USER: question ASSISTANT: answer</s>, after the text of a system turn.

    Args:
        marks: type of a part of a question (image, video, audio) -> its text.
    """
    media = "".join(f"{{% elif p.type == '{kind}' %}}{text}" for kind, text in marks.items())
    parts = f"{{% for p in m.content %}}{{% if p.type == 'text' %}}{{{{ p.text }}}}{media}{{% endif %}}{{% endfor %}}"
    question = f"{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{parts}{{% endif %}}"
    answer = f"{{% generation %}} {_TEXT_OF}{{{{ eos_token }}}}{{% endgeneration %}}"
    return (
        f"{{% for m in messages %}}{{% if m.role == 'user' %}}USER: {question} ASSISTANT:"
        f"{{% elif m.role == 'assistant' %}}{answer}{{% else %}}{_TEXT_OF} {{% endif %}}{{% endfor %}}"
    )


def text_values(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return the config of a language model: 4 layers, 64 wide, 8 heads in 4 groups, so tp and pp may be 1, 2 or 4."""
    return {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": MAX_TOKENS,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "tie_word_embeddings": False,
    }


def tower_values() -> dict[str, Any]:
    """Return the config of a vision tower: 4 layers, 64 wide, 4 heads."""
    return {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "patch_size": PATCH,
        "image_size": SIDE,
    }


def write(
    model_class: type[PreTrainedModel], config: PretrainedConfig, processor: ProcessorMixin, folder: Path, seed: int
) -> None:
    """Write a model with random weights and its processor, which has the tokenizer."""
    model = model_class(config).float()
    _randomize(model, seed)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def _randomize(model: torch.nn.Module, seed: int) -> None:
    """Fill all weights from a seed: biases and norms too, so that a swapped or transposed tensor changes answers."""
    generator = torch.Generator().manual_seed(seed)
    norms = [name for name, module in model.named_modules() if isinstance(module, _CENTERED)]
    centered = {f"{name}.weight" for name in norms}  # whose scale is 1 + weight
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            is_scale = "norm" in name and name.endswith("weight") and name not in centered
            is_gate = parameter.numel() == 1  # of a whole layer, which would hardly count
            parameter.copy_(noise if is_gate else 1 + 0.1 * noise if is_scale else 0.08 * noise)
