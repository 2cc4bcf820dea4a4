"""Loads the processors of a Hugging Face folder, and how its model class makes tokens of media."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoImageProcessor,
    AutoVideoProcessor,
    BaseImageProcessor,
    BaseVideoProcessor,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.image_processing_backends import TorchvisionBackend
from transformers.models.auto.image_processing_auto import DEFAULT_TO_PIL_BACKEND_IMAGE_PROCESSORS

from llava_mcore.compat.transformers import video_processor_class
from llava_mcore.config.sections.data import Limits, PixelRange
from llava_mcore.data.processors.audio_processor import AudioPreprocessor, Audios, choose_audios
from llava_mcore.data.processors.image_processor import ImagePreprocessor, MediaPreprocessor
from llava_mcore.data.processors.pixel_range import FRAMES, range_problems, set_pixel_range
from llava_mcore.errors import ConversionError, DataError
from llava_mcore.files.regular import read_object
from llava_mcore.files.torch_files import why_not_loaded
from llava_mcore.media.clip_plan import AudioPlan
from llava_mcore.media.media import MediaPlan, Processing
from llava_mcore.models.architectures.hf_config import VALUE_ERRORS
from llava_mcore.models.architectures.registry import architecture_of, classes_that_take_videos

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
LOAD_ERRORS = (*VALUE_ERRORS, OSError, RuntimeError, ImportError, StrictDataclassError)
"""Errors that transformers raises for missing or invalid files."""

VIDEO_FILE, PROCESSOR_FILE, SECTION = "video_preprocessor_config.json", "processor_config.json", "video_processor"
"""A video processor is in the first file, or in a section of the second."""
IMAGE_FILE = "preprocessor_config.json"
"""Older folders, such as the released ones of Qwen2-VL and Qwen2.5-VL, have only this file: transformers then reads the
settings for images for videos too."""


@dataclass(frozen=True)
class Videos:
    """The video processor and the tokenizer's placeholder; or, in `reason`, why samples with videos cannot be used."""

    processor: BaseVideoProcessor | None = None
    token: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Processors:
    """The processors of images (None: the class takes none, or there is a problem with it), videos and audio clips."""

    images: BaseImageProcessor | None = None
    videos: Videos = field(default_factory=Videos)
    audios: Audios = field(default_factory=Audios)


def load_processors(
    folders: list[Path],
    config: PretrainedConfig | None,
    tokenizer: PreTrainedTokenizerBase | None,
    pixels: PixelRange,
    video_pixels: PixelRange,
    errors: list[str],
) -> Processors:
    """Load the processors of what the class of `config` takes.

    Args:
        folders: where to look, in this order.
        config, tokenizer: None if they could not be loaded; then as much as possible is checked.
        pixels, video_pixels: the ranges of resized images and frames.
        errors: gets a line for everything that is missing or does not match.
    """
    # The image processor alone can be checked without config or tokenizer.
    images = _load_image_processor(folders, errors) if config is None or architecture_of(config).takes_images else None
    if config is not None and images is not None:
        wrong = range_problems(images, config)
        errors += wrong or set_pixel_range(images, pixels, config)
    if config is None or tokenizer is None:
        return Processors(images)
    # Samples with videos or audio are refused later if their processor cannot be used.
    audios = choose_audios(folders, PROCESSOR_FILES, config, tokenizer, LOAD_ERRORS, errors)
    videos = choose_videos(folders, config, tokenizer, LOAD_ERRORS)
    if videos.processor is not None:
        wrong = range_problems(videos.processor, config, FRAMES)
        errors += wrong or set_pixel_range(videos.processor, video_pixels, config, FRAMES)
    elif video_pixels != PixelRange():
        errors.append(f"{FRAMES.typed_flags(video_pixels)} cannot be used: {videos.reason}")
    return Processors(images, videos, audios)


def _load_image_processor(folders: list[Path], errors: list[str]) -> BaseImageProcessor | None:
    folder = next((f for f in folders if any((f / name).is_file() for name in PROCESSOR_FILES)), None)
    if folder is None:
        errors.append(f"no image processor in {folders[0]}: none of {', '.join(PROCESSOR_FILES)}")
        return None
    try:
        return _of_folder(folder)
    except (*LOAD_ERRORS, DataError) as error:
        errors.append(f"the image processor in {folder} cannot be used: {why_not_loaded(error)}")
        return None


def _of_folder(folder: Path) -> BaseImageProcessor:
    """Load the processor with torchvision as its backend, whatever the folder names.

    The classes with Pillow differ from it by up to 0.015 per value, so the choice does not depend on what is installed.
    Exceptions are those for which transformers itself uses Pillow: torchvision before 0.27 lacks their Lanczos filter.
    Raises OSError or ValueError if the folder has none, DataError without torchvision.
    """
    processor = _image_processor(folder, "torchvision")
    if not isinstance(processor, TorchvisionBackend):
        raise DataError(f"{type(processor).__name__} is not backed by torchvision; install torchvision")
    if type(processor).__name__ in DEFAULT_TO_PIL_BACKEND_IMAGE_PROCESSORS:
        return _image_processor(folder, "pil")
    return processor


def _image_processor(folder: Path, backend: str) -> BaseImageProcessor:
    return AutoImageProcessor.from_pretrained(folder, backend=backend, local_files_only=True, trust_remote_code=False)


def media_preprocessor(
    processors: Processors,
    config: PretrainedConfig | None,
    plan: MediaPlan | None,
    limits: Limits,
    errors: list[str],
) -> MediaPreprocessor | None:
    """Return what turns encoded media into the tower's input; None after a problem, which is added to `errors`."""
    if config is None or plan is None:
        return None
    if isinstance(plan, AudioPlan):
        assert processors.audios.extractor is not None, "there is no plan without one"
        return AudioPreprocessor(processors.audios.extractor, plan)
    if processors.images is None:
        return None
    try:
        shape = architecture_of(config).pixel_shape(config)
        return ImagePreprocessor(processors.images, shape, plan, limits.image_pixels, processors.videos.processor)
    except (*LOAD_ERRORS, DataError) as error:
        errors.append(f"the image processor cannot be used: {why_not_loaded(error)}")
        return None


def media_plan(
    folders: list[Path],
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    processors: Processors,
    errors: list[str],
) -> MediaPlan | None:
    """Return how media become tokens; a processor with different tokens for images is reported."""
    architecture, images, audios = architecture_of(config), processors.images, processors.audios.extractor
    file = next((f / "processor_config.json" for f in folders if (f / "processor_config.json").is_file()), None)
    settings = None if file is None else _read_json(file, errors)
    try:
        if settings is not None:
            errors += [f"{file}: {problem}" for problem in architecture.processor_problems(config, settings)]
        if tokenizer is None or (images if architecture.takes_images else audios) is None:
            return None
        how = Processing(tokenizer, images, settings or {}, processors.videos.processor, audios)
        return architecture.media(config, how)
    except ConversionError as error:
        errors.append(str(error))
    except LOAD_ERRORS as error:
        errors.append(
            f"config.json or the processor's settings in {folders[0]} have a value that cannot be used ({error!r}): "
            "correct it, or take the files of the original model"
        )
    return None


def _read_json(file: Path, errors: list[str]) -> dict[str, Any] | None:
    try:
        return read_object(file, DataError)
    except DataError as error:
        errors.append(str(error))
        return None


def choose_videos(
    folders: Sequence[Path],
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    load_errors: tuple[type[Exception], ...],
) -> Videos:
    """Load the video processor of the first folder that has one.

    Args:
        load_errors: errors that transformers raises for missing or invalid files.
    """
    architecture = architecture_of(config)
    if not architecture.takes_videos:
        known = ", ".join(classes_that_take_videos())
        return Videos(reason=f"{architecture.model_class.__name__} does not support videos; classes that do: {known}")
    token = architecture.video_placeholder(tokenizer)
    token_id = tokenizer.get_vocab().get(token)
    if token_id is None:
        return Videos(reason=f"the tokenizer has no {token}; add it as a special token")
    if token_id != config.video_token_id:
        return Videos(reason=f"video_token_id is {config.video_token_id} in config.json, but {token} is {token_id}")
    return _load(folders, config, token, load_errors)


def _load(
    folders: Sequence[Path], config: PretrainedConfig, token: str, load_errors: tuple[type[Exception], ...]
) -> Videos:
    """Load the video processor; arguments as for `choose_videos`, and the placeholder."""
    # The settings for videos, else those for images, which transformers would read for them.
    own_folder = next((folder for folder in folders if _has_video_processor(folder)), None)
    folder = own_folder or next((folder for folder in folders if (folder / IMAGE_FILE).is_file()), None)
    expected = video_processor_class(config)
    advice = (
        f"write {folders[0] / VIDEO_FILE}, as the released folder has it or {expected.__name__}.save_pretrained does"
    )
    if folder is None:
        return Videos(
            reason=f"{folders[0]} has no video processor: neither {VIDEO_FILE} nor {IMAGE_FILE}, and no {SECTION} in "
            f"{PROCESSOR_FILE}; {advice}"
        )
    # transformers chooses the class by the settings; it must be the one that belongs to the model.
    known = config if own_folder is None else None  # settings for images may not tell the class
    try:
        processor = AutoVideoProcessor.from_pretrained(
            folder, config=known, local_files_only=True, trust_remote_code=False
        )
    except load_errors as error:
        return Videos(reason=f"the video processor in {folder} cannot be loaded: {why_not_loaded(error)}")
    if type(processor) is not expected:  # as for Qwen3-VL with IMAGE_FILE alone, which names Qwen2-VL's image processor
        return Videos(
            reason=f"the video processor in {folder} is {type(processor).__name__}, but "
            f"{architecture_of(config).model_class.__name__} takes {expected.__name__}; {advice}"
        )
    return Videos(processor, token)


def _has_video_processor(folder: Path) -> bool:
    """Return whether a folder has settings of its own for videos."""
    if (folder / VIDEO_FILE).is_file():
        return True
    if not (folder / PROCESSOR_FILE).is_file():
        return False
    try:
        return SECTION in read_object(folder / PROCESSOR_FILE, DataError)
    except DataError:
        return False  # reported where the file is read for images
