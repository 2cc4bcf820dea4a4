"""The whole build: read the parts, compose them, write the folder, read it back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    ProcessorMixin,
)

from llava_mcore.build import language, vision
from llava_mcore.build.architectures.base import FolderClass
from llava_mcore.build.architectures.registry import folder_class
from llava_mcore.build.chat_template import choose_template
from llava_mcore.build.compose import compose, whole_config
from llava_mcore.build.language import IMAGE_TOKEN
from llava_mcore.build.options import BuildOptions, Say
from llava_mcore.build.sources import ModelSource, find_source
from llava_mcore.build.upcycle import load_language_model, require_dense
from llava_mcore.build.write_folder import PROBE, Part, check_text, count, fit_vocabulary, require_size, write_folder
from llava_mcore.errors import ConfigError, ConversionError, problems
from llava_mcore.files.atomic import require_absent
from llava_mcore.media.media import Processing, Size, VideoShape
from llava_mcore.models.architectures.registry import ARCHITECTURES, architecture_of
from llava_mcore.models.vision.features import image_side

_PROBE = f"USER: {IMAGE_TOKEN}\n{PROBE}"


@dataclass(frozen=True)
class Sources:
    """Sources of all parts."""

    text: ModelSource
    vision: ModelSource
    tokenizer: ModelSource
    image_processor: ModelSource


def find_sources(options: BuildOptions) -> Sources:
    """Resolve the given names. Raises ConfigError for an invalid one."""
    text = find_source(options.text_model, "--text-model", gguf_file=options.gguf_file, may_be_gguf=True)
    tower = find_source(options.vision_model, "--vision-model")
    return Sources(
        text,
        tower,
        find_source(options.tokenizer, "--tokenizer") if options.tokenizer else text,
        find_source(options.image_processor, "--image-processor") if options.image_processor else tower,
    )


def build_llava(options: BuildOptions, say: Say) -> list[Part]:
    """Write `options.save_dir`, a complete Hugging Face folder, and return its parts.

    Raises:
        ConfigError, ConversionError: the build is not possible; nothing was written.
    """
    # Options and sources: nothing is read yet.
    require_absent(options.save_dir, activity="a build")
    require_size(options)
    kind, sources = folder_class(options), find_sources(options)
    # Small files first: errors are reported before gigabytes are read.
    text_config = language.load_language_config(sources.text)
    require_dense(text_config, sources.text, options.upcycle)
    own_config = vision.load_vision_config(sources.vision)
    kind.require_tower(own_config, options)
    positions = None if kind.resamples else text_config.max_position_embeddings
    asked_config = vision.asked_size(own_config, options.image_size, positions)
    image_processor, side = vision.load_image_processor(sources.image_processor, asked_config, options)
    vision_config = vision.resized(asked_config, side)
    plan = vision.plan_features(vision_config, options, kind.layers)
    # Tokenizer and processor; a sketch of the whole config shows whether the parts fit.
    tokenizer = language.load_tokenizer(sources.tokenizer, kind.named_tokens)
    ids = language.add_special_tokens(tokenizer, [IMAGE_TOKEN, *kind.named_tokens.values(), *kind.marks])
    with features_for(kind.connector):
        sketch = kind.config(text_config, vision_config, plan, ids)
        kind.tokens_per_tile(sketch)
    template = tokenizer.chat_template = choose_template(
        tokenizer, options.chat_template, say, videos=ARCHITECTURES[kind.architecture].takes_videos
    )
    processor = kind.processor(image_processor, tokenizer, sketch, plan, template)

    # The weights of both parts.
    say(f"language model: {sources.text}")
    dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    text = load_language_model(sources.text, dtype, options.upcycle, seed=options.seed, say=say)
    fit_vocabulary(text, tokenizer, pad=options.vocab_size_padding, say=say)
    say(f"vision tower: {sources.vision}")
    if side != image_side(own_config):
        said = "--image-size" if options.image_size else "the image processor's"
        say(f"  positions: those for {image_side(own_config)} px, interpolated to {said} {side} px")
    tower = vision.load_vision_tower(sources.vision, vision_config, text.dtype)
    # The whole model, with a new connector, written and read back.
    generation = language.settled_generation_config(text, tokenizer, ids, say)
    config = whole_config(kind, text, tower, plan, ids)
    model = compose(kind, text, tower, config, seed=options.seed)
    model.generation_config = generation
    _say_features(kind, plan, model, processor, options, say)
    check = partial(check_folder, config=model.config, processor=processor)
    write_folder(model, kind.tensors(model), processor, options, check)
    return summary(kind, model, sources, options)


def check_folder(folder: Path, *, config: PretrainedConfig, processor: ProcessorMixin) -> None:
    """Read config, tokenizer and processor back as a user would.

    Raises:
        ConversionError: lists the differences.
    """
    errors = []
    read_config = type(config).from_pretrained(folder)
    written, read = config.to_dict(), read_config.to_dict()
    for key in ("image_token_id", "pad_token_id", "eos_token_id", "tie_word_embeddings", "vision_feature_layer"):
        if read.get(key) != written.get(key):
            errors.append(f"config.json: {key} is {read.get(key)}, was {written.get(key)}")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    read_processor, problems_of_text = check_text(folder, tokenizer, processor, _PROBE)
    errors += problems_of_text
    size = image_side(config.vision_config)
    picture = Image.new("RGB", (size + 5, size // 2 + 3))
    placeholders = list(read_processor(images=picture, text=_PROBE)["input_ids"][0]).count(config.image_token_id)
    num_features = placeholders_of(read_config, read_processor, (picture.height, picture.width))
    if placeholders != num_features:
        errors.append(
            f"processor: {placeholders} placeholders for an image, but the model computes {num_features} features"
        )
    if architecture_of(read_config).takes_videos:
        errors += _video_problems(read_config, read_processor, (picture.height, picture.width))
    if errors:
        raise ConversionError(problems("the folder differs from what was written", errors))


def _video_problems(config: PretrainedConfig, processor: ProcessorMixin, size: Size) -> list[str]:
    """Return the difference between the processor's placeholders and the model's features for a video of two frames."""
    frames = torch.zeros(2, 3, *size, dtype=torch.uint8)
    ids = processor(videos=[frames], text=processor.video_token, do_sample_frames=False)["input_ids"][0]
    placeholders = list(ids).count(config.video_token_id)
    expected = _video_placeholders(config, processor, VideoShape(2, *size))
    if placeholders == expected:
        return []
    return [f"processor: {placeholders} placeholders for a video, but the model computes {expected} features"]


def _video_placeholders(config: PretrainedConfig, processor: ProcessorMixin, shape: VideoShape) -> int:
    """Return the number of placeholders that the model needs for a video."""
    how = Processing(processor.tokenizer, processor.image_processor, {}, processor.video_processor)
    (tokens,) = architecture_of(config).media(config, how).video_tokens([shape])
    return int((tokens.ids == config.video_token_id).sum())


def placeholders_of(config: PretrainedConfig, processor: ProcessorMixin, size: Size) -> int:
    """Return the number of placeholders that the model needs for an image of this height and width."""
    plan = architecture_of(config).media(config, Processing(processor.tokenizer, processor.image_processor, {}))
    return int((plan.tokens([size])[0].ids == config.image_token_id).sum())


def summary(kind: FolderClass, model: PreTrainedModel, sources: Sources, options: BuildOptions) -> list[Part]:
    """Return one row per part; tied weights are counted once."""
    config = model.config
    text, tower, names = config.text_config, config.vision_config, kind.parts
    tied = "tied" if config.tie_word_embeddings else "untied"
    projector = kind.projector(model)
    widths = " -> ".join(map(str, kind.widths(projector, text.hidden_size)))
    newline = []
    if architecture_of(config).has_newline:
        newline.append(Part("image_newline", f"new, seed {options.seed}", str(text.hidden_size), text.hidden_size))
    head = 0 if config.tie_word_embeddings else model.lm_head.weight.numel()
    return [
        Part(
            names[0],
            str(sources.vision),
            f"{tower.model_type}: {tower.num_hidden_layers} layers x {tower.hidden_size}, {image_side(tower)} px",
            count(model.get_submodule(f"model.{names[0]}")),
        ),
        Part(names[1], f"new, seed {options.seed}", widths, count(projector)),
        *newline,
        Part(
            names[2],
            str(sources.text),
            f"{text.model_type}: {text.num_hidden_layers} layers x {text.hidden_size}, vocabulary {text.vocab_size}",
            count(model.get_submodule(f"model.{names[2]}")),
        ),
        Part("lm_head", str(sources.text), tied, head),
    ]


@contextlib.contextmanager
def features_for(connector: str) -> Iterator[None]:
    """Report features that the class's connector does not support as ConfigError."""
    try:
        yield
    except ConversionError as error:
        raise ConfigError(f"--connector {connector}: {error}") from error


def _say_features(
    kind: FolderClass,
    plan: vision.FeatureShape,
    model: PreTrainedModel,
    processor: ProcessorMixin,
    options: BuildOptions,
    say: Say,
) -> None:
    """Print what the projector reads, because it determines how images become tokens."""
    config, projector = model.config, kind.projector(model)
    input_width = kind.widths(projector, config.text_config.hidden_size)[0]
    layers = " and ".join(str(layer) for layer in plan.layers)
    expanded = " (--expand-projector)" if options.expand_projector else ""
    tokens = f"{kind.tokens_per_tile(config)} tokens per {kind.tile}"
    if pinpoints := kind.pinpoints(config.vision_config):
        most_tokens = max(placeholders_of(config, processor, (height, width)) for height, width in pinpoints)
        tokens += f", about {most_tokens} for an image with the largest grid"
    if architecture_of(config).takes_videos:
        one, two = (_video_placeholders(config, processor, VideoShape(n, 64, 64)) for n in (1, 2))
        tokens += f", {two - one} per frame of a video"
    say(f"  features: hidden state {layers}{expanded}, strategy {plan.strategy}: {tokens}")
    say(f"projector: {input_width} -> {config.text_config.hidden_size}, new weights from seed {options.seed}")
