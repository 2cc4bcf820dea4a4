"""The chat template of a built folder: it accepts plain strings and lists of image and text parts."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from llava_mcore.build.options import Say
from llava_mcore.errors import ConversionError
from llava_mcore.templates.content_parts import accept_parts
from llava_mcore.templates.named import is_name, missing_tokens, named_template, read_file


def choose_template(
    tokenizer: PreTrainedTokenizerBase, choice: str | Path | None, say: Say, *, videos: bool = False
) -> str:
    """Return the template to save: by name or from a file, else the tokenizer's own, else the plain one.

    A template that does not support lists of parts is preceded by a preamble that flattens them.

    Raises:
        ConfigError: unknown name, unreadable file, or the tokenizer cannot spell the format's tokens.
        ConversionError: the template cannot render a question and its answer, with or without an image.
    """
    if choice is None and tokenizer.chat_template:
        template, origin = _own_template(tokenizer), "the text model's tokenizer"
    elif choice is None or is_name(str(choice)):
        return _named(tokenizer, "plain" if choice is None else str(choice), say)
    else:
        template, origin = read_file(str(choice)), str(choice)
    accepted = accept_parts(tokenizer, template, origin, videos=videos)
    changed = "unchanged" if accepted == template else "after a preamble that turns typed parts into a string"
    say(f"chat template: {origin}, {changed}")
    return accepted


def _named(tokenizer: PreTrainedTokenizerBase, name: str, say: Say) -> str:
    template = named_template(name, tokenizer)
    say(f"chat template: {name}" + ("" if tokenizer.chat_template else "; the tokenizer has none"))
    missing = missing_tokens(name, tokenizer)
    if missing:
        say(f"  the tokenizer has no {', '.join(missing)}: written as plain text, several tokens each")
    return template


def _own_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the tokenizer's template; the default if there are several named ones."""
    template = tokenizer.chat_template
    if isinstance(template, str):
        return template
    if "default" not in template:
        raise ConversionError(
            f"the tokenizer has chat templates {', '.join(sorted(template))}, none of them 'default': "
            "give one with --chat-template NAME|FILE"
        )
    return str(template["default"])
