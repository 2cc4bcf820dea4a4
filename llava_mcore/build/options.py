"""Options of a build. Light imports, so that --help is fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llava_mcore.config.model_classes import MODEL_CLASSES

DEFAULT_VISION_MODEL = "openai/clip-vit-large-patch14-336"
CONNECTORS = ("mlp", "pixel_shuffle", "perceiver")
ARCHITECTURES = tuple(model_type for model_type, row in MODEL_CLASSES.items() if row.folder is not None)
"""A class is chosen by its connector, its model_type, or both."""
VOCAB_MULTIPLE = 128
DTYPE_NAMES = ("auto", "float32", "bfloat16", "float16")

Say = Callable[[str], None]
"""Receives one line of progress."""


@dataclass(frozen=True)
class BuildOptions:
    """Options of one build. Models, tokenizer and image processor are folders or tags of the Hugging Face hub.

    Attributes:
        save_dir: folder to create; must be new or empty.
        gguf_file: name of the GGUF file inside the text model's folder; None: search for one.
        audio_model: of Whisper; None: a model with images is built.
        tokenizer: None: the text model's.
        image_processor: None: the vision model's.
        chat_template: name of a template or Jinja file; None: the tokenizer's template, or a plain one.
        dtype: dtype of every weight; "auto": the text model's.
        vocab_size_padding: round the vocabulary up to a multiple of 128.
        expand_projector: let the projector read a second layer of the tower, so that its input is twice as wide.
        connector: one of CONNECTORS; None: that of the architecture.
        architecture: one of ARCHITECTURES; None: the first with the connector, llava without one.
        image_size: height and width of an image in pixels; None: that of the image processor.
        vision_feature_layers: indices into the tower's hidden states (0 is the embedding), as in LlavaConfig; None:
            the class's default.
        vision_feature_select_strategy: None: "default" (drop the class token) for CLIP and "full" for SigLIP.
        upcycle: E and K: the MLPs of the language model become mixtures of E experts, K of them for each token; None:
            the language model stays as it is.
        seed: seed of the projector's initial weights, and of routers.
        max_shard_size: maximum size of a weight file, such as "5GB".
    """

    save_dir: Path
    text_model: str
    vision_model: str = DEFAULT_VISION_MODEL
    audio_model: str | None = None
    gguf_file: str | None = None
    tokenizer: str | None = None
    image_processor: str | None = None
    chat_template: Path | None = None
    dtype: str = "auto"
    vocab_size_padding: bool = False
    expand_projector: bool = False
    connector: str | None = None
    architecture: str | None = None
    image_size: int | None = None
    vision_feature_layers: tuple[int, ...] | None = None
    vision_feature_select_strategy: Literal["default", "full"] | None = None
    upcycle: tuple[int, int] | None = None
    seed: int = 1234
    max_shard_size: str = "5GB"
