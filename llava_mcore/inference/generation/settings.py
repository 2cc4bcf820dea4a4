"""How tokens are chosen and when an answer ends: what `generate` of transformers would do with the folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import GenerationConfig, LogitsProcessorList, PretrainedConfig
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llava_mcore.errors import ConfigError, ConversionError, DataError
from llava_mcore.files.torch_files import why_not_loaded

FILE = "generation_config.json"
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "guidance_scale": (None, 1, 1.0),
    "sequence_bias": (None,),
    "bad_words_ids": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,),
    "watermarking_config": (None,),
    "encoder_repetition_penalty": (None, 1, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "stop_strings": (None,),
    "max_time": (None,),
}
"""Settings of transformers that generation at tp x pp does not support, and the values that turn them off."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Settings of transformers that say how tokens are sampled. The flags decide that, not the folder."""


@dataclass(frozen=True)
class TokenSampling:
    """How tokens are sampled; without `temperature` the most probable one is taken.

    `seed`: sampling depends only on it and on the number of the prompt.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ConfigError for values outside their ranges."""
        errors = []
        if self.temperature is None and (self.top_p is not None or self.top_k is not None):
            errors.append("--top-p and --top-k need --temperature: without it the best token is taken")
        if self.temperature is not None and not 0 < self.temperature < float("inf"):
            errors.append(
                f"--temperature must be above 0, found {self.temperature}; omit it for the most probable token"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            errors.append(f"--top-p must be above 0 and at most 1, found {self.top_p}")
        if self.top_k is not None and self.top_k < 1:
            errors.append(f"--top-k must be at least 1, found {self.top_k}")
        if errors:
            raise ConfigError("; ".join(errors))


@dataclass(frozen=True)
class Settings:
    """`config`: transformers' settings. `seed`: of the sampling, if tokens are sampled.

    `most_positions`: that the model has; None if its config does not say.
    """

    config: GenerationConfig
    max_new_tokens: int
    end_ids: frozenset[int]
    seed: int = 0
    most_positions: int | None = None

    def within(self, window: int | None) -> Settings:
        """Return these settings for a model whose sequences must not be longer than `window` (None: any length)."""
        lengths = [x for x in (self.most_positions, window) if x is not None]
        return replace(self, most_positions=min(lengths, default=None))

    @property
    def draws(self) -> bool:
        """Whether tokens are sampled. Otherwise the most probable ones are taken."""
        return bool(self.config.do_sample)

    def longest_answer(self, prompt_length: int) -> int:
        """Return the most tokens of an answer: it ends with the model's positions, after which it would be garbage.

        Args:
            prompt_length: tokens of the prompt, media included.

        Raises:
            DataError: the prompt leaves no position for an answer.
        """
        limit = self.most_positions
        if limit is None:
            return self.max_new_tokens
        if prompt_length >= limit:
            raise DataError(
                f"the question has {prompt_length} tokens with its images and earlier turns, and the model has "
                f"{limit} positions for question and answer (max_position_embeddings, or the sliding window of a model "
                "for which it is not supported yet): shorten the question"
            )
        return min(self.max_new_tokens, limit - prompt_length)

    def processors(self, prompt_length: int, device: torch.device, *, num_left_out: int = 0) -> LogitsProcessorList:
        """Return what changes the logits before a token is chosen, in transformers' order.

        Args:
            prompt_length: tokens of the prompt, media included.
            num_left_out: tokens of the prompt that are missing in the ids that the processors get.
        """
        config, ends, name = self.config, sorted(self.end_ids), str(device)
        num_ids = prompt_length - num_left_out
        processors: list[LogitsProcessor] = []
        if config.repetition_penalty not in (None, 1.0):
            processors.append(RepetitionPenaltyLogitsProcessor(penalty=config.repetition_penalty))
        if config.no_repeat_ngram_size:
            processors.append(NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
        if config.min_length and config.min_new_tokens is None and ends:
            processors.append(MinLengthLogitsProcessor(max(0, config.min_length - num_left_out), ends, device=name))
        if config.min_new_tokens and ends:
            processors.append(MinNewTokensLengthLogitsProcessor(num_ids, config.min_new_tokens, ends, device=name))
        if config.suppress_tokens is not None:
            processors.append(SuppressTokensLogitsProcessor(config.suppress_tokens, device=name))
        if config.begin_suppress_tokens is not None:
            processors.append(SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, num_ids, device=name))
        if self.draws:
            processors += self._warpers()
        return LogitsProcessorList(processors)

    def _warpers(self) -> list[LogitsProcessor]:
        config, warpers = self.config, []
        if config.temperature not in (None, 1.0):
            warpers.append(TemperatureLogitsWarper(config.temperature))
        if config.top_k:
            warpers.append(TopKLogitsWarper(top_k=config.top_k))
        if config.top_p is not None and config.top_p < 1.0:
            warpers.append(TopPLogitsWarper(top_p=config.top_p))
        return warpers


def read_settings(
    hf_dir: Path,
    hf: PretrainedConfig,
    tokenizer_eos: int | None,
    *,
    max_new_tokens: int,
    sampling: TokenSampling,
) -> Settings:
    """Return the settings of a Hugging Face folder; answers end at its EOS ids, else at the tokenizer's.

    Raises:
        ConversionError: its generation_config.json cannot be read.
    """
    # The sampling of the command, not that of the folder.
    config = _config(hf_dir, hf)
    config.do_sample = sampling.temperature is not None
    config.max_new_tokens, config.max_length = max_new_tokens, None
    for name in SAMPLING:
        setattr(config, name, None)
    if config.do_sample:
        # None would be transformers' default, which for top_k is 50.
        config.temperature, config.top_p, config.top_k = (
            sampling.temperature,
            sampling.top_p or 1.0,
            sampling.top_k or 0,
        )
    # Answers end at the ids that the folder names: one, several, or none.
    if config.eos_token_id is None:
        config.eos_token_id = tokenizer_eos
    ends = config.eos_token_id
    ids = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    positions = hf.get_text_config().to_dict().get("max_position_embeddings")
    return Settings(config, max_new_tokens, frozenset(ids), sampling.seed, positions)


def _config(hf_dir: Path, hf: PretrainedConfig) -> GenerationConfig:
    if not (hf_dir / FILE).is_file():
        return GenerationConfig.from_model_config(hf)
    try:
        return GenerationConfig.from_pretrained(hf_dir, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        raise ConversionError(f"{hf_dir / FILE} cannot be used: {why_not_loaded(error)}") from error


def require_streaming(hf_dir: Path, hf: PretrainedConfig) -> None:
    """Raise ConfigError if the folder asks for beam search, whose answers cannot be streamed."""
    num_beams = _config(hf_dir, hf).num_beams
    if num_beams not in (None, 1):
        raise ConfigError(
            f"{hf_dir / FILE} sets num_beams = {num_beams}: chat prints each word as soon as it is chosen, but beam "
            "search chooses none before the end. Set num_beams to 1, or use `generate`"
        )


def require_known(settings: Settings, source: Path) -> None:
    """Raise ConfigError for settings of transformers that generation at tp x pp does not support."""
    values = {name: settings.config.to_dict().get(name) for name in UNSUPPORTED}
    unknown = [f"{name} = {value}" for name, value in values.items() if value not in UNSUPPORTED[name]]
    if unknown:
        raise ConfigError(
            f"{source / FILE} sets {', '.join(unknown)}, which only transformers knows: remove it, or export the "
            "checkpoint and answer with --hf-dir"
        )
