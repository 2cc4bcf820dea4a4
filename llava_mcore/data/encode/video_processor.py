"""The video processor of a checkpoint, or why videos are not supported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoVideoProcessor, BaseVideoProcessor, PretrainedConfig, PreTrainedTokenizerBase

from llava_mcore.compat.transformers import video_processor_class
from llava_mcore.errors import DataError
from llava_mcore.files.regular import read_object
from llava_mcore.files.torch_files import why_not_loaded
from llava_mcore.models.architectures.registry import architecture_of, classes_that_take_videos

VIDEO_FILE, PROCESSOR_FILE, SECTION = "video_preprocessor_config.json", "processor_config.json", "video_processor"
"""A video processor is in the first file, or in a section of the second."""
PICTURE_FILE = "preprocessor_config.json"
"""Older folders, such as the released ones of Qwen2-VL and Qwen2.5-VL, have only this file: transformers then reads the
settings for pictures for videos too."""


@dataclass(frozen=True)
class Videos:
    """The video processor and the tokenizer's placeholder; or, in `reason`, why samples with videos cannot be used."""

    processor: BaseVideoProcessor | None = None
    token: str | None = None
    reason: str | None = None


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
    own_folder = next((folder for folder in folders if _has_video_processor(folder)), None)
    folder = own_folder or next((folder for folder in folders if (folder / PICTURE_FILE).is_file()), None)
    expected = video_processor_class(config)
    advice = (
        f"write {folders[0] / VIDEO_FILE}, as the released folder has it or {expected.__name__}.save_pretrained does"
    )
    if folder is None:
        return Videos(
            reason=f"{folders[0]} has no video processor: neither {VIDEO_FILE} nor {PICTURE_FILE}, and no {SECTION} in "
            f"{PROCESSOR_FILE}; {advice}"
        )
    known = config if own_folder is None else None  # settings for pictures may not tell the class
    try:
        processor = AutoVideoProcessor.from_pretrained(
            folder, config=known, local_files_only=True, trust_remote_code=False
        )
    except load_errors as error:
        return Videos(reason=f"the video processor in {folder} cannot be loaded: {why_not_loaded(error)}")
    if (
        type(processor) is not expected
    ):  # as for Qwen3-VL with PICTURE_FILE alone, which names Qwen2-VL's image processor
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
        return False  # reported where the file is read for pictures
