"""The video processor of a checkpoint, or why videos are not supported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoVideoProcessor, BaseVideoProcessor, PretrainedConfig, PreTrainedTokenizerBase

from llava_mcore.errors import DataError
from llava_mcore.files.json_files import read_object
from llava_mcore.files.torch_files import why_not_loaded
from llava_mcore.models.architectures.registry import architecture_of, classes_that_take_videos

VIDEO_FILE, PROCESSOR_FILE, SECTION = "video_preprocessor_config.json", "processor_config.json", "video_processor"
"""A video processor is in the first file, or in a section of the second."""


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
    folder = next((folder for folder in folders if _has_video_processor(folder)), None)
    if folder is None:
        return Videos(reason=f"{folders[0]} has no video processor: no {VIDEO_FILE}, nor one in {PROCESSOR_FILE}")
    try:
        processor = AutoVideoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except load_errors as error:
        return Videos(reason=f"the video processor in {folder} cannot be loaded: {why_not_loaded(error)}")
    return Videos(processor, token)


def _has_video_processor(folder: Path) -> bool:
    if (folder / VIDEO_FILE).is_file():
        return True
    if not (folder / PROCESSOR_FILE).is_file():
        return False
    try:
        return SECTION in read_object(folder / PROCESSOR_FILE, DataError)
    except DataError:
        return False  # reported where the file is read for pictures
