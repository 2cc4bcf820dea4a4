"""A Qwen2-Audio folder: Whisper's encoder, a new linear projector and a language model."""

from __future__ import annotations

import copy
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Qwen2AudioConfig,
    Qwen2AudioEncoder,
    Qwen2AudioEncoderConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
    WhisperModel,
)

from llava_mcore.build import language
from llava_mcore.build.architectures.base import tensors_to_write
from llava_mcore.build.chat_template import choose_template
from llava_mcore.build.compose import init_projector
from llava_mcore.build.options import BuildOptions, Say
from llava_mcore.build.sources import ModelSource, check_loaded, find_source, reading, require_clear_weights
from llava_mcore.build.upcycle import load_language_model, require_dense
from llava_mcore.build.write_folder import Part, check_text, count, fit_vocabulary, require_size, write_folder
from llava_mcore.errors import ConfigError, ConversionError, problems
from llava_mcore.files.atomic import require_absent
from llava_mcore.media.clip_plan import AudioPlan, check_extractor
from llava_mcore.models.audio.qwen2_audio import Qwen2AudioTower
from llava_mcore.templates.named import AUDIO_TOKENS

NAMED_TOKENS = dict(zip(("audio_bos_token", "audio_token", "audio_eos_token"), AUDIO_TOKENS, strict=True))
"""Special tokens, by the names under which the class's processor asks the tokenizer for them."""
PICTURE_FLAGS = {
    "vision_model": "--vision-model",
    "image_processor": "--image-processor",
    "expand_projector": "--expand-projector",
    "connector": "--connector",
    "architecture": "--architecture",
    "image_size": "--image-size",
    "vision_feature_layers": "--vision-feature-layer",
    "vision_feature_select_strategy": "--vision-feature-select-strategy",
}
"""Options of a build that have no effect here, and their flags."""
WHISPER = "whisper"


def build_audio(options: BuildOptions, say: Say) -> list[Part]:
    """Write `options.save_dir`, a complete Hugging Face folder of Qwen2-Audio, and return its parts.

    Raises:
        ConfigError, ConversionError: the build is not possible; nothing was written.
    """
    # Options and sources: nothing is read yet.
    require_absent(options.save_dir, activity="a build")
    require_size(options)
    _refuse_picture_flags(options)
    assert options.audio_model is not None
    text_source = find_source(options.text_model, "--text-model", gguf_file=options.gguf_file, may_be_gguf=True)
    source = find_source(options.audio_model, "--audio-model")
    # Small files first: errors are reported before gigabytes are read.
    require_dense(language.load_language_config(text_source), text_source, options.upcycle)
    encoder_config = load_encoder_config(source)
    extractor = load_extractor(source)
    check_extractor(extractor, encoder_config)
    tokenizer_source = find_source(options.tokenizer, "--tokenizer") if options.tokenizer else text_source
    tokenizer = language.load_tokenizer(tokenizer_source, NAMED_TOKENS)
    ids = language.add_special_tokens(tokenizer, NAMED_TOKENS.values())
    template = tokenizer.chat_template = choose_template(tokenizer, options.chat_template, say)
    processor = Qwen2AudioProcessor(extractor, tokenizer, chat_template=template, **NAMED_TOKENS)

    # The weights of both parts.
    say(f"language model: {text_source}")
    dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    text = load_language_model(text_source, dtype, options.upcycle, seed=options.seed, say=say)
    fit_vocabulary(text, tokenizer, pad=options.vocab_size_padding, say=say)
    say(f"audio encoder: {source}")
    encoder = load_encoder(source, encoder_config, text.dtype)
    # The whole model, with a new projector, written and read back.
    generation = language.settled_generation_config(text, tokenizer, ids, say)
    model = _compose(text, encoder, ids, seed=options.seed, say=say)
    model.generation_config = generation
    seconds, width = extractor.n_samples / extractor.sampling_rate, model.config.text_config.hidden_size
    say(f"  features: 25 tokens per second, at most {seconds:g} seconds of audio")
    say(f"projector: {encoder_config.d_model} -> {width}, new weights from seed {options.seed}")
    check = partial(check_folder, config=model.config, processor=processor)
    write_folder(model, tensors_to_write(model), processor, options, check)
    return _summary(model, source, text_source, options)


def _refuse_picture_flags(options: BuildOptions) -> None:
    defaults = {field.name: field.default for field in fields(BuildOptions)}
    flags = [flag for name, flag in PICTURE_FLAGS.items() if vars(options)[name] != defaults[name]]
    if flags:
        raise ConfigError(f"--audio-model builds Qwen2-Audio, which has no images: omit {', '.join(flags)}")


def load_encoder_config(source: ModelSource) -> Qwen2AudioEncoderConfig:
    """Return the configuration of Whisper's encoder as Qwen2-Audio has it.

    Raises:
        ConversionError: it is unreadable, not Whisper's, or has settings that are not computed.
    """
    require_clear_weights(source)
    with reading("the audio model's configuration", source):
        config = AutoConfig.from_pretrained(source.name, **source.load_arguments)
    if config.model_type != WHISPER:
        raise ConversionError(f"{source}: model_type is {config.model_type!r}; the supported audio model is {WHISPER}")
    whisper = config.to_dict()
    encoder_keys = {
        name for name in Qwen2AudioEncoderConfig().to_dict() if name not in ("model_type", "transformers_version")
    }
    encoder_config = Qwen2AudioEncoderConfig(**{name: value for name, value in whisper.items() if name in encoder_keys})
    Qwen2AudioTower().config_from_hf(encoder_config, encoder_config.encoder_layers)
    return encoder_config


def load_extractor(source: ModelSource) -> WhisperFeatureExtractor:
    """Read the feature extractor. Raises ConversionError if it is unreadable or another one."""
    with reading("the feature extractor", source, "It is preprocessor_config.json of the Whisper folder."):
        extractor = AutoFeatureExtractor.from_pretrained(source.name, **source.load_arguments)
    if not isinstance(extractor, WhisperFeatureExtractor):
        raise ConversionError(f"{source}: the feature extractor is a {type(extractor).__name__}, not Whisper's")
    return extractor


def load_encoder(source: ModelSource, config: Qwen2AudioEncoderConfig, dtype: torch.dtype) -> Qwen2AudioEncoder:
    """Read the weights of Whisper's encoder, without the layers of its decoder.

    Raises:
        ConversionError: it is unreadable, or weights are missing.
    """
    with reading("the audio model", source):
        full_config = AutoConfig.from_pretrained(source.name, **source.load_arguments)
        full_config.decoder_layers = 0
        model, info = WhisperModel.from_pretrained(
            source.name, config=full_config, dtype=dtype, output_loading_info=True
        )
    check_loaded(source, "encoder", {name for name in info["missing_keys"] if "encoder." in name})
    with torch.device("meta"):
        encoder = Qwen2AudioEncoder(config)
    encoder.load_state_dict(model.encoder.state_dict(), assign=True)
    return encoder


def _compose(
    text: PreTrainedModel, encoder: Qwen2AudioEncoder, ids: language.TokenIds, *, seed: int, say: Say
) -> Qwen2AudioForConditionalGeneration:
    """Return the whole model. It shares the parameters of the arguments, except for a tied output layer."""
    head = text.lm_head
    if head.weight is text.get_input_embeddings().weight:
        say("  the output layer was tied to the embedding: it becomes a copy, as Qwen2-Audio has both")
        head = copy.deepcopy(head)
    text.config.tie_word_embeddings = False
    language.settle_ids(text.config, ids)
    for part in (text.config, encoder.config):
        part.name_or_path = ""  # would be a path on this machine
    config = Qwen2AudioConfig(
        audio_config=encoder.config.to_dict(), text_config=text.config.to_dict(), audio_token_index=ids.audio
    )
    language.settle_ids(config, ids)
    with torch.device("meta"):
        model = Qwen2AudioForConditionalGeneration(config)
    model.model.language_model, model.lm_head, model.model.audio_tower = text.model, head, encoder
    projector = model.model.multi_modal_projector.to_empty(device="cpu")
    init_projector(projector, torch.Generator().manual_seed(seed))
    projector.to(text.dtype)
    assert not any(p.is_meta for p in model.parameters())
    return model.eval()


def check_folder(folder: Path, *, config: PretrainedConfig, processor: ProcessorMixin) -> None:
    """Read config, tokenizer and processor back as a user would.

    Raises:
        ConversionError: lists the differences.
    """
    read_config = Qwen2AudioConfig.from_pretrained(folder)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    errors = [
        f"config.json: {key} is {there}, was {here}"
        for key, there, here in (
            ("audio_token_id", read_config.audio_token_id, config.audio_token_id),
            ("text_config.vocab_size", read_config.text_config.vocab_size, config.text_config.vocab_size),
        )
        if there != here
    ]
    read_processor, problems_of_text = check_text(folder, tokenizer, processor)
    errors += problems_of_text
    plan, wave = AudioPlan(read_config, read_processor.feature_extractor), np.zeros(12_345, np.float32)
    audio: dict[str, Any] = {"audio": [wave], "sampling_rate": plan.sampling_rate}
    ids = read_processor(text=f"{read_processor.audio_token}?", **audio)["input_ids"][0]
    placeholders, (expected,) = list(ids).count(read_config.audio_token_id), plan.audio_tokens([len(wave)])
    if placeholders != len(expected):
        errors.append(f"processor: {placeholders} placeholders for a clip, but the model computes {len(expected)}")
    if errors:
        raise ConversionError(problems("the folder differs from what was written", errors))


def _summary(
    model: Qwen2AudioForConditionalGeneration, source: ModelSource, text_source: ModelSource, options: BuildOptions
) -> list[Part]:
    """Return one row per part."""
    text, encoder, inner = model.config.text_config, model.config.audio_config, model.model
    shape = (
        f"{encoder.model_type}: {encoder.encoder_layers} layers x {encoder.d_model}, {encoder.num_mel_bins} mel bins"
    )
    decoder = f"{text.model_type}: {text.num_hidden_layers} layers x {text.hidden_size}, vocabulary {text.vocab_size}"
    widths = f"{encoder.d_model} -> {text.hidden_size}"
    return [
        Part("audio_tower", str(source), shape, count(inner.audio_tower)),
        Part("multi_modal_projector", f"new, seed {options.seed}", widths, count(inner.multi_modal_projector)),
        Part("language_model", str(text_source), decoder, count(inner.language_model)),
        Part("lm_head", str(text_source), "untied", model.lm_head.weight.numel()),
    ]
