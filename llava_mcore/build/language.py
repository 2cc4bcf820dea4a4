"""The language model: all its weights (lm_head too), its tokenizer, and the vocabulary they share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import pre_tokenizers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from llava_mcore.build.options import VOCAB_MULTIPLE, Say
from llava_mcore.build.sources import ModelSource, check_loaded, reading, require_clear_weights, require_tokenizer_files
from llava_mcore.errors import ConversionError
from llava_mcore.models.language.families.registry import texts_of_any_class
from llava_mcore.templates.named import AUDIO_TOKENS

IMAGE_TOKEN = "<image>"
VIDEO_TOKEN = "<video>"
AUDIO_TOKEN = AUDIO_TOKENS[1]
PAD_TOKEN = "<pad>"
_SMALLEST_VOCABULARY = 32


@dataclass(frozen=True)
class TokenIds:
    """Ids that must be equal in config, generation config and tokenizer; None if the tokenizer has no such token."""

    image: int | None
    pad: int
    eos: int
    bos: int | None
    video: int | None
    audio: int | None = None


def load_language_config(source: ModelSource) -> PreTrainedConfig:
    """Read the configuration of a supported, unquantized language model.

    Raises:
        ConversionError: it is unreadable, of an unsupported family, or quantized, or its weights are ambiguous.
    """
    require_clear_weights(source)
    with reading("the language model's configuration", source):
        config = AutoConfig.from_pretrained(source.name, **source.load_arguments)
    if config.model_type not in texts_of_any_class():
        known = ", ".join(texts_of_any_class())
        raise ConversionError(f"{source}: model_type is {config.model_type!r}; supported language models: {known}")
    if "quantization_config" in config.to_dict() and source.gguf_file is None:
        raise ConversionError(f"{source}: the weights are quantized and cannot be trained; use the unquantized model")
    return config


def load_language_model(source: ModelSource, dtype: torch.dtype | str, say: Say) -> PreTrainedModel:
    """Read the causal language model with its head. `dtype`: a torch dtype or "auto" (that of the files).

    Raises:
        ConversionError: it is unreadable, or weights are missing.
    """
    with reading("the language model", source):
        model, info = AutoModelForCausalLM.from_pretrained(
            source.name, dtype=dtype, output_loading_info=True, **source.load_arguments
        )
    check_loaded(source, "language model", set(info["missing_keys"]))
    if info["unexpected_keys"]:
        say(f"  ignored, not part of a {model.config.model_type} model: {', '.join(sorted(info['unexpected_keys']))}")
    if source.gguf_file is not None:
        del model.config.quantization_config  # the weights were dequantized while loading
    if model.config.to_dict().get("final_logit_softcapping") is not None:
        # transformers' LLaVA never caps logits, and serving must compute what was trained.
        say(f"  final_logit_softcapping = {model.config.final_logit_softcapping} ignored: LLaVA does not support it")
        model.config.final_logit_softcapping = None
    return model


def load_tokenizer(source: ModelSource, named: Mapping[str, str]) -> PreTrainedTokenizerBase:
    """Read a tokenizer that has an EOS token, and add named special tokens to it.

    Raises:
        ConversionError: it is unreadable, or lacks a vocabulary or EOS.
    """
    hint = "Give --tokenizer TAG_OR_DIR."
    require_tokenizer_files(source, hint)
    with reading("the tokenizer", source, hint):
        tokenizer = AutoTokenizer.from_pretrained(source.name, **source.load_arguments, **named)
    if len(tokenizer) < _SMALLEST_VOCABULARY:
        raise ConversionError(f"{source}: the tokenizer has only {len(tokenizer)} entries: no vocabulary. {hint}")
    if not tokenizer.is_fast:
        raise ConversionError(f"{source}: {type(tokenizer).__name__} cannot be saved as a tokenizer.json. {hint}")
    if source.gguf_file is not None:
        _repair_gguf_tokenizer(tokenizer, source)
    if tokenizer.eos_token_id is None:
        raise ConversionError(
            f"{source}: the tokenizer has no EOS token, so the model could not learn to end its answers. {hint}"
        )
    return tokenizer


def _repair_gguf_tokenizer(tokenizer: PreTrainedTokenizerBase, source: ModelSource) -> None:
    """Read from the file what transformers 5.17 gets wrong: EOS (it returns BOS), pad, and SmolLM's digit rule."""
    from gguf import GGUFReader

    with reading("the GGUF file", source):
        fields = GGUFReader(f"{source.name}/{source.gguf_file}").fields if source.folder else {}
    ids = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for name, key in ids.items():
        field = fields.get(f"tokenizer.ggml.{key}_token_id")
        if field is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(int(field.contents())))
    tokenizer.clean_up_tokenization_spaces = False  # decoding must return the text unchanged, even "a ."
    kind = fields.get("tokenizer.ggml.pre")
    if kind is not None and kind.contents() == "smollm":
        # SmolLM splits off every digit before the byte-level rule, which then cannot join a space to it.
        digits = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])


def add_special_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Iterable[str]) -> TokenIds:
    """Add special tokens to the tokenizer, and `<pad>` unless it has a pad token that is not EOS."""
    special_tokens: dict[str, Any] = {"extra_special_tokens": list(dict.fromkeys(tokens))}
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        special_tokens["pad_token"] = PAD_TOKEN
    tokenizer.add_special_tokens(special_tokens, replace_extra_special_tokens=False)
    return token_ids(tokenizer)


def token_ids(tokenizer: PreTrainedTokenizerBase) -> TokenIds:
    """Read the ids back from a tokenizer."""
    image, video, audio = (tokenizer.get_vocab().get(token) for token in (IMAGE_TOKEN, VIDEO_TOKEN, AUDIO_TOKEN))
    return TokenIds(image, tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id, video, audio)


def wanted_vocab_size(tokenizer: PreTrainedTokenizerBase, vocab_size: int, *, pad: bool) -> int:
    """Return the number of rows that the embedding needs: at least the current one; a multiple of 128 if `pad`."""
    rows = max(vocab_size, max(tokenizer.get_vocab().values()) + 1)
    return -(-rows // VOCAB_MULTIPLE) * VOCAB_MULTIPLE if pad else rows


def grow_vocabulary(model: PreTrainedModel, vocab_size: int) -> None:
    """Append rows to the embedding and the head, in place; each is the mean of the existing rows.

    The mean is deterministic, and a new token starts with an average logit.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    embedding.weight = _with_mean_rows(embedding.weight, vocab_size)
    head.weight = embedding.weight if tied else _with_mean_rows(head.weight, vocab_size)
    embedding.num_embeddings = head.out_features = model.config.vocab_size = vocab_size


def _with_mean_rows(weight: nn.Parameter, rows: int) -> nn.Parameter:
    """[v, h] -> [rows, h], without a second copy in fp32."""
    mean = weight.data.mean(dim=0, dtype=torch.float32).to(weight.dtype)
    return nn.Parameter(torch.cat([weight.data, mean.expand(rows - weight.shape[0], -1)]))


def settle_ids(config: PreTrainedConfig, ids: TokenIds) -> None:
    """Write the ids into a configuration, in place. A BOS that the tokenizer lacks stays as it is."""
    config.pad_token_id, config.eos_token_id = ids.pad, ids.eos
    if ids.bos is not None:
        config.bos_token_id = ids.bos


def settled_generation_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: TokenIds, say: Say
) -> GenerationConfig:
    """Return the language model's generation config with our pad, and with our EOS among its stop tokens."""
    generation = _portable(model.generation_config, say)
    stops = generation.eos_token_id if generation.eos_token_id is not None else model.config.eos_token_id
    listed = [] if stops is None else [stops] if isinstance(stops, int) else list(stops)
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    # A default id that is a normal word in this vocabulary must not end answers.
    other_ends = [i for i in listed if i in special and i != ids.eos]
    generation.eos_token_id = [ids.eos, *other_ends] if other_ends else ids.eos
    generation.pad_token_id = ids.pad
    if ids.bos is not None:
        generation.bos_token_id = ids.bos
    return generation


def _portable(original: GenerationConfig, say: Say) -> GenerationConfig:
    """Return a copy that transformers can save: it refuses sampling settings without do_sample."""
    values = {
        k: v for k, v in original.to_diff_dict().items() if k not in ("_from_model_config", "transformers_version")
    }
    generation = GenerationConfig(**values)
    try:
        generation.validate(strict=True)
    except ValueError as error:
        lost = sorted(set(values) - {"bos_token_id", "eos_token_id", "pad_token_id"})
        reason = str(error).splitlines()[0]
        say(f"  generation settings ignored ({', '.join(lost)}), because transformers refuses them: {reason}")
        generation = GenerationConfig(eos_token_id=original.eos_token_id, bos_token_id=original.bos_token_id)
    return generation
