"""The choice of the chat template, and of the language of prompts for data without questions."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerBase

from llava_mcore.errors import DataError
from llava_mcore.files.regular import read_object
from llava_mcore.templates.bounded import check_bounds
from llava_mcore.templates.content_parts import accept_parts
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
    tokenizer: PreTrainedTokenizerBase, folders: list[Path], *, chat_template: str | None, lang: Lang | None
) -> TemplateChoice:
    """Return the requested template, else that of the first folder that has one, else that of the language.

    Args:
        folders: the tokenizer's own folder first.
        chat_template: a name or a file.

    Raises:
        ConfigError: unknown name, unreadable file, or a tokenizer that cannot spell the format's tokens.
        ConversionError: the file's template cannot render a question and its answer.
        DataError: no template is given.
    """
    if chat_template is not None and not is_name(chat_template):
        text = accept_parts(tokenizer, read_file(chat_template), chat_template)
        return TemplateChoice(text, f"{chat_template} (--chat-template)", lang or "en")
    if chat_template is not None:
        return _named(tokenizer, chat_template, "--chat-template", lang)
    own_template = _own_template(tokenizer, folders)
    if own_template is not None:
        check_bounds(own_template[0], str(own_template[1]))
        return TemplateChoice(own_template[0], str(own_template[1]), lang or "en")
    if lang is not None:
        return _named(tokenizer, BY_LANG[lang], f"--lang {lang}, as the tokenizer has none", lang)
    raise DataError(
        f"no chat template in {folders[0]}: choose one with --chat-template ({', '.join(NAMES)}, or a .jinja file) or "
        "--lang (jp, en), or put a chat_template.jinja there"
    )


def _named(tokenizer: PreTrainedTokenizerBase, name: str, reason: str, lang: Lang | None) -> TemplateChoice:
    text = named_template(name, tokenizer)
    spelt = missing_tokens(name, tokenizer)
    if spelt:
        logger.warning("the tokenizer has no %s: written as plain text, several tokens each", ", ".join(spelt))
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
