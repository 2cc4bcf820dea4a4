"""What a build is asked for. Imports nothing heavy, so that --help is quick."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DEFAULT_VISION_MODEL = "openai/clip-vit-large-patch14-336"
CONNECTORS = ("mlp", "pixel_shuffle")
ARCHITECTURES = ("llava", "llava_next", "llava_onevision", "internvl")
"""By which a class is chosen: its connector, its model_type, or both."""
VOCAB_MULTIPLE = 128
DTYPE_NAMES = ("auto", "float32", "bfloat16", "float16")

Say = Callable[[str], None]
"""Takes one line of progress."""


@dataclass(frozen=True)
class BuildOptions:
    """One build. Models, tokenizer and image processor are a folder or a tag of the Hugging Face hub.

    Attributes:
        save_dir: folder to make; must not exist or be empty.
        gguf_file: name of the GGUF file inside the text model's folder; None looks for one.
        tokenizer: None takes the text model's.
        image_processor: None takes the vision model's.
        chat_template: name of a template or Jinja file; None takes the tokenizer's template, or a plain one.
        dtype: of every weight; "auto" is the text model's own.
        vocab_size_padding: round the vocabulary up to a multiple of 128.
        expand_projector: let the projector read a second layer of the tower, so that its input is twice as wide.
        connector: one of CONNECTORS; None is that of the architecture.
        architecture: one of ARCHITECTURES; None is the connector's first, llava without one.
        image_size: height and width of a picture in pixels; None is what the image processor makes.
        vision_feature_layers: indices into the tower's hidden states (0 is the embedding), as in LlavaConfig; None is
            the class's own choice.
        vision_feature_select_strategy: None is "default" (drop the class token) for CLIP and "full" for SigLIP.
        seed: of the projector's first weights.
        max_shard_size: of one weight file, such as "5GB".
    """

    save_dir: Path
    text_model: str
    vision_model: str = DEFAULT_VISION_MODEL
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
    seed: int = 1234
    max_shard_size: str = "5GB"
