"""Configuration of the training data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from llava_mcore.config.sections.augment import TransformConfig, transform_list
from llava_mcore.config.sections.base import Flag, Needs, Parts, Seconds, Section, Size


def _path_or_url(value: Any) -> Any:
    """A Path would remove one of the two slashes of a URL."""
    if not isinstance(value, str | Path):
        raise ValueError("expected a path or a URL")
    return value if "://" in str(value) else Path(value).expanduser()


DataPath = Annotated[Path | str, BeforeValidator(_path_or_url)]


BlendWeights = Literal["samples", "tokens"]
"""Unit in which the weights of a blend count."""
Handling = Literal["text", "control"]
"""How special tokens in the text of a conversation are read."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a sample, so that a single one cannot use all memory or time. Larger samples are skipped."""

    sample_bytes: int = 1 << 28
    """Bytes of its json, images, frames and audio clips together, and of each of them."""
    text_chars: int = 1_000_000
    """Characters of all turns of a conversation."""
    image_pixels: int = 178_956_970
    """Width times height of an image or frame before it is resized; Pillow refuses more."""
    frames: int = 4096
    """Frames of all videos of a conversation together."""


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class PixelRange:
    """Minimum and maximum width x height of a resized image or frame; None: those of the checkpoint's processor."""

    smallest: int | None = None
    largest: int | None = None


class DataConfig(Section):
    """The training data."""

    flag_group = "data"

    path: Annotated[DataPath | None, Flag("--data-path")] = None
    """Prepared folder of shards, or the .yaml file of a blend; or the URL of either in an object store."""
    seq_length: Annotated[Size, Flag("--seq-length")] = 2048
    """Maximum number of tokens of a sample, or of a pack of samples, including those of images, videos and audio."""
    num_workers: Annotated[int, Flag("--num-workers")] = Field(2, ge=0, le=1024)
    """Loader processes per data-parallel rank; 0 loads in the training process."""
    timeout: Seconds = 600
    """Seconds that a loader process may take for a batch before the run ends. With num_workers 0, only storage has time
    limits."""
    shuffle_buffer_size: int = Field(10_000, ge=0, le=10**7)
    """Size of the window in which samples are shuffled, after blocks of 64 consecutive samples were shuffled over the
    whole dataset. Only sample numbers are kept, so a large window costs no memory; a small one reads fewer shards at a
    time. 0 or 1 keeps the order of the shards."""
    num_streams: Parts | None = None
    """Streams that the data is divided into for the whole run, ideally a multiple of every number of data-parallel
    ranks that it will have. Default: 48, or 768 from 200,000 samples on, for any number of ranks. A resumed run
    keeps the number."""
    blend_weights: BlendWeights = "samples"
    """Unit of the weights of a blend: samples, or tokens as `prepare` has counted them (manifest.json)."""
    image_token_id: Annotated[int | None, Flag("--image-token-id", after="--max-skip-rate")] = Field(
        None, ge=0, le=10**9
    )
    """Id of the tokenizer's placeholder for images. Default: the one the tokenizer names, else that of <image>."""
    pad_token_id: Annotated[int | None, Flag("--pad-token-id")] = Field(None, ge=0, le=10**9)
    """Id of the token that pads batches, which is never trained. Default: the tokenizer's pad token."""
    packing: Annotated[bool, Flag("--packing", after="--num-workers")] = False
    """Pack samples into sequences of seq_length tokens; they do not attend to each other."""
    packing_buffer_size: Annotated[Size, Needs("data.packing")] = 64
    """Number of waiting samples from which each stream chooses those that fill a pack best."""
    sample_multiple: Annotated[Size | None, Needs("data.packing")] = None
    """Multiple that the lengths of packed samples are rounded up to. Default: 2 x --cp, the number of
    chunks that a sample is cut into; 1 without --cp. Runs with the same multiple build the same packs at any --cp."""
    max_waiting_bytes: Annotated[int, Needs("data.packing")] = Field(4 << 30, ge=0, le=1 << 50)
    """Bytes per node, over all its loader processes, for samples that wait for their pack. Samples beyond that are read
    again when their pack is built."""
    max_media_tokens: Size | None = None
    """Maximum number of patches of the images and frames (of audio: 20 ms frames) in a pack (without packing: in a
    sample), so that no rank's tower gets more than fits into memory; a sample with more patches is too long
    (on_too_long). `check` prints how many patches samples have. Default: no limit except seq_length."""
    on_too_long: Annotated[Literal["drop", "truncate", "error"], Flag("--on-too-long")] = "drop"
    """A conversation longer than seq_length, or with more patches than max_media_tokens, is skipped and counted (drop),
    cut before the first image, video or audio clip that does not fit (truncate), or ends the run (error)."""
    max_skip_rate: Annotated[float, Flag("--max-skip-rate")] = Field(0.01, ge=0, le=1)
    """Fraction of the samples that may be skipped as broken or too long before the run ends with a list of them."""
    min_pixels: Annotated[Size | None, Flag("--min-pixels")] = None
    """For Qwen-VL, the minimum width x height of a resized image: a smaller image is enlarged. Default: the image
    processor's. The exported folder gets the same limits."""
    max_pixels: Annotated[Size | None, Flag("--max-pixels")] = None
    """For Qwen-VL, the maximum width x height of a resized image, which bounds its number of tokens. Default: the
    image processor's. The exported folder gets the same limits."""
    video_min_pixels: Annotated[Size | None, Flag("--video-min-pixels")] = None
    """For Qwen-VL, the minimum width x height of a resized frame of a video; for Qwen3-VL, of all its frames together.
    Default: the video processor's. The exported folder gets the same limits."""
    video_max_pixels: Annotated[Size | None, Flag("--video-max-pixels")] = None
    """For Qwen-VL, the maximum width x height of a resized frame of a video; for Qwen3-VL, of all its frames together.
    Default: the video processor's. The exported folder gets the same limits."""
    augment: Annotated[tuple[TransformConfig, ...], BeforeValidator(transform_list)] = ()
    """Transforms of the images and frames of training samples, in their order: names in torchvision.transforms.v2,
    each with its arguments, such as [{name: ColorJitter, brightness: 0.2}, {name: RandomGrayscale, p: 0.1}]. They may
    not change an image's size."""
    chat_template: Annotated[str | None, Flag("--chat-template")] = None
    """Chat template to train with and to export: vicuna, llama-2, llama-3, chatml, llm-jp, mistral, plain, or a .jinja
    file. Default: the tokenizer's own."""
    lang: Annotated[Literal["jp", "en"] | None, Flag("--lang")] = None
    """Language of prompts for data without questions; a tokenizer without a chat template gets llm-jp (jp) or vicuna
    (en)."""
    special_tokens_in_text: Handling = "text"
    """Meaning of the tokenizer's special tokens in the text of a conversation, such as <|im_end|> in an answer: plain
    text, or the tokens themselves, for data that relies on it."""
    max_sample_bytes: int = Field(LIMITS.sample_bytes, ge=1, le=1 << 40)
    """Bytes of a sample, its json, images, frames and audio clips together; a larger one is skipped."""
    max_text_chars: int = Field(LIMITS.text_chars, ge=1, le=1 << 40)
    """Characters of a conversation; a longer one is skipped before it is tokenized."""
    max_image_pixels: int = Field(LIMITS.image_pixels, ge=1, le=LIMITS.image_pixels)
    """Width times height of an image or frame; a sample with a larger one is skipped. Default: Pillow's own limit."""
    max_frames: int = Field(LIMITS.frames, ge=1, le=1 << 30)
    """Frames of all videos of a conversation together; a sample with more is skipped before they are decoded."""

    @property
    def pixels(self) -> PixelRange:
        """The limits of a resized image's area."""
        return PixelRange(self.min_pixels, self.max_pixels)

    @property
    def video_pixels(self) -> PixelRange:
        """The limits of a resized frame's area; for Qwen3-VL, of all frames of a video together."""
        return PixelRange(self.video_min_pixels, self.video_max_pixels)

    @property
    def limits(self) -> Limits:
        """The limits of a sample."""
        return Limits(self.max_sample_bytes, self.max_text_chars, self.max_image_pixels, self.max_frames)
