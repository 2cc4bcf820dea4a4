"""The chat template: its choice, with the language of prompts, and its file in a Hugging Face folder."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerBase

from llava_mcore.errors import CheckpointError, ConversionError, DataError
from llava_mcore.files.regular import read_object
from llava_mcore.templates.bounded import check_bounds
from llava_mcore.templates.content_parts import OWN_TEMPLATE, PLACEHOLDERS, accept_parts
from llava_mcore.templates.named import BY_LANG, NAMES, is_name, missing_tokens, named_template, read_file

logger = logging.getLogger(__name__)

Lang = Literal["jp", "en"]


@dataclass(frozen=True)
class TemplateChoice:
    """A template and why it was chosen."""

    text: str
    reason: str
    lang: Lang
    """Language of the prompts for data without questions."""


def choose_template(
    tokenizer: PreTrainedTokenizerBase,
    folders: list[Path],
    *,
    chat_template: str | None,
    lang: Lang | None,
    image_token: str = PLACEHOLDERS["image"],
) -> TemplateChoice:
    """Return the requested template, else that of the first folder that has one, else that of the language.

    Args:
        folders: the tokenizer's own folder first.
        chat_template: a name or a file.
        image_token: the class's placeholder of an image.

    Raises:
        ConfigError: unknown name, unreadable file, or a tokenizer that cannot spell the format's tokens.
        ConversionError: the template cannot render a question about an image and its answer.
        DataError: no template is given.
    """
    if chat_template is not None and not is_name(chat_template):
        text = accept_parts(tokenizer, read_file(chat_template), chat_template, image_token=image_token)
        return TemplateChoice(text, f"{chat_template} (--chat-template)", lang or "en")
    if chat_template is not None:
        return _named(tokenizer, chat_template, "--chat-template", lang, image_token)
    own_template = _own_template(tokenizer, folders)
    if own_template is not None:
        check_bounds(own_template[0], str(own_template[1]))
        return TemplateChoice(own_template[0], str(own_template[1]), lang or "en")
    if lang is not None:
        reason = f"--lang {lang}, as the tokenizer has none"
        return _named(tokenizer, BY_LANG[lang], reason, lang, image_token)
    raise DataError(
        f"no chat template in {folders[0]}: choose one with --chat-template ({', '.join(NAMES)}, or a .jinja file) or "
        "--lang (jp, en), or put a chat_template.jinja there"
    )


def _named(
    tokenizer: PreTrainedTokenizerBase, name: str, reason: str, lang: Lang | None, image_token: str
) -> TemplateChoice:
    if image_token != PLACEHOLDERS["image"]:
        raise ConversionError(
            f"chat template {name} ({reason}) writes {PLACEHOLDERS['image']} for an image, and the model's placeholder "
            f"is {image_token}. {OWN_TEMPLATE}"
        )
    text = named_template(name, tokenizer)
    missing = missing_tokens(name, tokenizer)
    if missing:
        logger.warning("the tokenizer has no %s: written as plain text, several tokens each", ", ".join(missing))
    return TemplateChoice(text, f"{name} ({reason})", lang or ("jp" if name == BY_LANG["jp"] else "en"))


def _own_template(tokenizer: PreTrainedTokenizerBase, folders: list[Path]) -> tuple[str, Path] | None:
    """Return the template that Hugging Face's processor of the first folder with one would use, and its file."""
    for folder in folders:
        jinja, legacy = folder / "chat_template.jinja", folder / "chat_template.json"
        file = jinja if jinja.is_file() else legacy
        if file.is_file():
            try:
                if file == jinja:
                    return file.read_text(encoding="utf-8"), file
                return str(read_object(file, DataError)["chat_template"]), file
            except (ValueError, KeyError) as error:
                raise DataError(f"{file} cannot be read as a chat template: {error!r}") from error
        if folder == folders[0] and tokenizer.chat_template is not None:
            return tokenizer.get_chat_template(), folder
    return None


FILE = "chat_template.jinja"
LEGACY_FILE = "chat_template.json"
CONFIGS = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
"""Files with an older copy under "chat_template", which some readers of Hugging Face folders prefer."""


def write_chat_template(folder: Path, template: str) -> None:
    """Make `template` the folder's only chat template, for both tokenizer and processor."""
    (folder / FILE).write_text(template, encoding="utf-8")
    (folder / LEGACY_FILE).unlink(missing_ok=True)
    for name in CONFIGS:
        path = folder / name
        config = read_object(path, CheckpointError) if path.is_file() else {}
        if "chat_template" in config:
            del config["chat_template"]
            path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def require_same_template(folder: Path, template: str) -> None:
    """Refuse to resume with another template than a checkpoint was trained with.

    Args:
        folder: the checkpoint's Hugging Face files.
        template: what the run would train with.

    Raises:
        CheckpointError: they differ.
    """
    path = folder / FILE
    before = path.read_text(encoding="utf-8") if path.is_file() else None
    if before is not None and before != template:
        raise CheckpointError(
            f"{folder.parent} cannot be resumed with another chat template: it was trained with {path}. Give the same "
            "--chat-template, --lang and --tokenizer-load-dir; to continue with another template, start a run with "
            "another --name from these weights (--megatron-load-dir)"
        )
