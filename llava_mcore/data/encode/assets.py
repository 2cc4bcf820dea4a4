"""Loads and checks the parts of a Hugging Face folder that turn samples into model inputs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from llava_mcore.config.sections.data import LIMITS, Handling, Limits, PixelRange
from llava_mcore.data.encode.chat_format import ChatFormat
from llava_mcore.data.encode.chat_template import Lang, TemplateChoice, choose_template
from llava_mcore.data.encode.special_tokens import check_tokenizer, choose_tokens
from llava_mcore.data.processors.image_processor import ImagePreprocessor, MediaPreprocessor
from llava_mcore.data.processors.images import ToRgb, on_white
from llava_mcore.data.processors.load import (
    LOAD_ERRORS,
    PROCESSOR_FILES,
    VIDEO_FILE,
    Processors,
    load_processors,
    media_plan,
    media_preprocessor,
)
from llava_mcore.data.processors.pixel_range import pixel_range_of
from llava_mcore.data.samples import AUDIO_MARK, IMAGE_MARK, VIDEO_MARK
from llava_mcore.errors import CheckpointError, ConversionError, DataError, LlavaMcoreError, problems
from llava_mcore.files.regular import kind_of
from llava_mcore.files.torch_files import why_not_loaded
from llava_mcore.media.media import MediaPlan
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.architectures.registry import architecture_of

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
ALL_TOKENIZER_FILES = (*TOKENIZER_FILES, "merges.txt", "added_tokens.json", "special_tokens_map.json")
ASSET_FILES = (
    *(*ALL_TOKENIZER_FILES, *PROCESSOR_FILES, VIDEO_FILE),
    *("config.json", "chat_template.jinja", "chat_template.json"),
)
_VOCABULARIES = [name for name in ALL_TOKENIZER_FILES if name != "tokenizer_config.json"]
"""Without the file that may hold the chat template, which is compared by itself."""
MOST_BYTES = 1 << 28
"""Maximum size of each file; the largest tokenizers have about 40 MB."""


@dataclass(frozen=True)
class Assets:
    """The parts of a checkpoint that the data pipeline needs; loader processes inherit them."""

    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    images: MediaPreprocessor
    """Turns images, videos or audio clips into the tower's input."""
    plan: MediaPlan
    pad_token_id: int
    eos_token_id: int
    lang: Lang
    """Language of the prompts for data without questions (data.prompts)."""
    limits: Limits = LIMITS
    pixels: PixelRange = field(default_factory=PixelRange)
    """The range of areas that images are resized to; empty for classes that do not resize to one."""
    video_pixels: PixelRange = field(default_factory=PixelRange)
    """The same for frames of videos; empty too if there is no video processor."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why samples with images, videos or audio clips cannot be used, by their mark; those without a reason can."""

    @property
    def pixel_ranges(self) -> dict[str, PixelRange]:
        """The ranges by the name of their field."""
        return {"pixels": self.pixels, "video_pixels": self.video_pixels}

    @property
    def to_rgb(self) -> ToRgb:
        """How images become RGB."""
        return self.images.to_rgb if isinstance(self.images, ImagePreprocessor) else on_white


def load_assets(
    hf_dir: Path,
    *,
    checkpoint_hf_dir: Path | None = None,
    chat_template: str | None = None,
    lang: Lang | None = None,
    image_token_id: int | None = None,
    pad_token_id: int | None = None,
    special_tokens_in_text: Handling = "text",
    limits: Limits = LIMITS,
    pixels: PixelRange = PixelRange(),  # noqa: B008  (it cannot be changed)
    video_pixels: PixelRange = PixelRange(),  # noqa: B008
) -> Assets:
    """Load tokenizer, chat template, and the processors of what the class takes: images, videos or audio.

    Args:
        checkpoint_hf_dir: the Hugging Face files of the checkpoint to train: its config.json is used, and its image
            processor or chat template if `hf_dir` has only a tokenizer.
        chat_template: a name or a .jinja file; None: the folder's own.
        lang: language of the prompts for data without questions, and of the template if there is no other.
        image_token_id: id of the placeholder for images; None: the tokenizer's, else that of <image>.
        pad_token_id: id of the padding token; None: the tokenizer's.
        special_tokens_in_text: how special tokens such as `<|im_end|>` in the text of a conversation are read.
        limits: the limits of a sample.
        pixels, video_pixels: ranges of the areas of resized images and frames, for classes that resize to one.

    Raises:
        DataError: lists everything that is missing or does not match.
    """
    errors: list[str] = []  # loading continues after a problem, so that one message lists all of them
    folders = [hf_dir] if checkpoint_hf_dir is None else [hf_dir, checkpoint_hf_dir]
    refuse_odd_files(folders)
    config = _load_config(folders[-1], errors)
    tokenizer = _open_tokenizer(hf_dir, {"image_token": image_token_id, "pad_token": pad_token_id}, errors)
    # Skip the parts whose tokenizer or class could not be loaded.
    choice = _choose_template(tokenizer, folders, config, chat_template, lang, errors)
    processors = load_processors(folders, config, tokenizer, pixels, video_pixels, errors)
    plan = None if config is None else media_plan(folders, config, tokenizer, processors, errors)
    preprocessor = media_preprocessor(processors, config, plan, limits, errors)
    token = None if tokenizer is None else check_tokenizer(tokenizer, config, errors)
    errors += _image_token_errors(config, image_token_id)
    if errors:
        raise DataError(problems(f"{hf_dir} cannot prepare conversations for the model", errors))
    assert config is not None and tokenizer is not None and choice is not None and preprocessor is not None
    assert plan is not None and token is not None
    # From here on nothing is missing; a template that cannot be used still raises.
    chat = _chat_format(hf_dir, tokenizer, choice, plan, special_tokens_in_text, _placeholders(token, plan, processors))
    return Assets(
        tokenizer=tokenizer,
        chat=chat,
        images=preprocessor,
        plan=plan,
        pad_token_id=int(tokenizer.pad_token_id),
        eos_token_id=int(tokenizer.eos_token_id),
        lang=choice.lang,
        limits=limits,
        pixels=pixel_range_of(processors.images, config),
        video_pixels=pixel_range_of(processors.videos.processor, config),
        refused=_refused(config, processors, preprocessor, chat),
    )


def _image_token_errors(config: PretrainedConfig | None, image_token_id: int | None) -> list[str]:
    if config is None or architecture_of(config).takes_images or image_token_id is None:
        return []
    return [f"--image-token-id {image_token_id} has no effect: the model takes no images; omit it"]


def _placeholders(image_token: str, plan: MediaPlan, processors: Processors) -> dict[str, Any]:
    """Return the names of the placeholders, by ChatFormat's arguments; None for media that the class does not take."""
    return {
        "image_token": image_token if plan.image_token_id is not None else None,
        "video_token": processors.videos.token,
        "audio_token": processors.audios.token,
    }


def _chat_format(
    hf_dir: Path,
    tokenizer: PreTrainedTokenizerBase,
    choice: TemplateChoice,
    plan: MediaPlan,
    special_tokens_in_text: Handling,
    tokens: Mapping[str, Any],
) -> ChatFormat:
    """Return how conversations are tokenized. `tokens`: the placeholders' names."""
    how: dict[str, Any] = {"special_tokens_in_text": special_tokens_in_text, "around_media": plan.around_media}
    try:
        chat = ChatFormat(tokenizer, choice.text, **tokens, **how)
    except DataError as error:
        raise DataError(problems(f"{hf_dir} cannot prepare conversations for the model", [str(error)])) from error
    _log_choice(choice, chat)
    return chat


def _refused(
    config: PretrainedConfig, processors: Processors, preprocessor: MediaPreprocessor, chat: ChatFormat
) -> dict[str, str]:
    """Return why samples with some media cannot be used, by their mark."""
    architecture, videos = architecture_of(config), processors.videos.reason
    if videos is None and isinstance(preprocessor, ImagePreprocessor):
        videos = preprocessor.no_videos or chat.no_videos
    no_images = None
    if not architecture.takes_images:
        no_images = f"{architecture.model_class.__name__} does not support images, only audio"
    reasons = {IMAGE_MARK: no_images, VIDEO_MARK: videos, AUDIO_MARK: processors.audios.reason}
    return {mark: reason for mark, reason in reasons.items() if reason is not None}


def _choose_template(
    tokenizer: PreTrainedTokenizerBase | None,
    folders: list[Path],
    config: PretrainedConfig | None,
    chat_template: str | None,
    lang: Lang | None,
    errors: list[str],
) -> TemplateChoice | None:
    if tokenizer is None:
        return None
    architecture = None if config is None else architecture_of(config)
    written = {"image_token": architecture.placeholder(tokenizer)} if architecture and architecture.takes_images else {}
    try:
        return choose_template(tokenizer, folders, chat_template=chat_template, lang=lang, **written)
    except LlavaMcoreError as error:
        errors.append(str(error))
        return None


def refuse_odd_files(folders: Sequence[Path]) -> None:
    """Raise DataError for files whose reading would block or never end."""
    errors = []
    for file in (folder / name for folder in folders for name in ASSET_FILES):
        if not file.exists():
            continue
        if not file.is_file():
            errors.append(f"{file} is {kind_of(file.stat().st_mode)}, not a regular file")
        elif file.stat().st_size > MOST_BYTES:
            errors.append(f"{file} has {file.stat().st_size} bytes; the limit is {MOST_BYTES}")
    if errors:
        raise DataError(problems(f"{folders[0]} cannot prepare conversations for the model", errors))


def _log_choice(choice: TemplateChoice, chat: ChatFormat) -> None:
    logger.info("chat template: %s; prompts for data without questions: %s", choice.reason, choice.lang)
    if chat.adds_eos:
        logger.info("it does not end answers with %s: training adds that, apply_chat_template will not", chat.eos_token)
    if chat.own_text_warning is not None:
        logger.warning("%s", chat.own_text_warning)
    if chat.several_turns is not None:
        logger.warning(
            "conversations with several questions will be skipped, because %s; give another template with "
            "--chat-template",
            chat.several_turns,
        )


def _load_config(folder: Path, errors: list[str]) -> PretrainedConfig | None:
    try:
        return load_hf_config(folder)
    except ConversionError as error:
        errors.append(str(error))
        return None


def require_same_tokenizer(folder: Path, tokenizer_dir: Path) -> None:
    """Refuse to resume with another tokenizer than a checkpoint was trained with.

    Args:
        folder: the checkpoint's Hugging Face files.
        tokenizer_dir: the tokenizer that the run would train with.

    Raises:
        CheckpointError: they differ.
        DataError: one of them cannot be loaded.
    """
    if all(_content(folder / name) == _content(tokenizer_dir / name) for name in _VOCABULARIES):
        return  # also if config.json lets transformers choose other classes for the two folders
    errors: list[str] = []
    before, now = (_load_tokenizer(x, errors) for x in (folder, tokenizer_dir))
    if errors:
        raise DataError(problems("the tokenizer cannot be compared with the checkpoint's", errors))
    assert before is not None and now is not None
    if before.backend_tokenizer.to_str() != now.backend_tokenizer.to_str():
        raise CheckpointError(
            f"{folder.parent} cannot be resumed with the tokenizer of {tokenizer_dir}: it was trained with the one in "
            f"{folder}. Omit --tokenizer-load-dir, or name a folder with that tokenizer; to continue with another one, "
            "start a run with another --name from these weights (--megatron-load-dir)"
        )


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _open_tokenizer(
    folder: Path, token_ids: Mapping[str, int | None], errors: list[str]
) -> PreTrainedTokenizerBase | None:
    """Load a tokenizer, whose special tokens are those of the ids that are not None."""
    tokenizer = _load_tokenizer(folder, errors)
    if tokenizer is not None:
        choose_tokens(tokenizer, token_ids, errors)
    return tokenizer


def _load_tokenizer(folder: Path, errors: list[str]) -> PreTrainedTokenizerBase | None:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        errors.append(f"no tokenizer in {folder}: none of {', '.join(TOKENIZER_FILES)}; see --tokenizer-load-dir")
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except LOAD_ERRORS as error:
        errors.append(f"the tokenizer in {folder} cannot be loaded: {why_not_loaded(error)}")
        return None
    if not tokenizer.is_fast:
        errors.append(f"{type(tokenizer).__name__} in {folder} does not support offsets; save it with a tokenizer.json")
        return None
    return tokenizer
