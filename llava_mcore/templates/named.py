"""From `--chat-template NAME|FILE` and `--lang` to the text of a template.

A named template is the preamble that turns images and typed parts into plain text, followed by the family's format.
The result is self-contained and can be exported as chat_template.jinja.
"""

from __future__ import annotations

import difflib
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from llava_mcore.errors import ConfigError
from llava_mcore.files.regular import RefusedFileError, read_regular_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_TEMPLATE_BYTES = 1 << 20
NAMES = ("vicuna", "llama-2", "llama-3", "chatml", "llm-jp", "mistral", "plain")
BY_LANG = {"jp": "llm-jp", "en": "vicuna"}
"""The template that `--lang` selects for a tokenizer without one."""

SPECIAL_TOKENS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama-3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}
"""A format's special tokens other than BOS and EOS; its own family's tokenizers have each as one token."""

AUDIO_TOKENS = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
"""Qwen2-Audio's tokens for an audio clip; the second is its placeholder."""

_OPEN_BEGINNING = ("vicuna", "chatml", "plain")
"""Formats that do not define BOS: it is added if the tokenizer starts texts with it."""
_BOS = "{{- bos_token -}}\n"
_SAMPLE = "Which digit is shown?"


def is_name(choice: str) -> bool:
    """Return whether this is a template's name and not a file.

    Raises:
        ConfigError: it is neither a known name nor looks like a file.
    """
    if choice in NAMES:
        return True
    path = Path(choice)
    if path.suffix in (".jinja", ".jinja2", ".j2") or len(path.parts) > 1 or path.is_file():
        return False
    close = difflib.get_close_matches(choice, NAMES, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise ConfigError(
        f"--chat-template {choice}: no such template{hint}; choose one of {', '.join(NAMES)}, or give a .jinja file"
    )


def read_file(choice: str) -> str:
    """Return the text of a template file. Raises ConfigError if it cannot be read."""
    try:
        return read_regular_file(Path(choice).expanduser(), MOST_TEMPLATE_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError, RefusedFileError) as error:
        raise ConfigError(f"--chat-template {choice}: cannot be read: {error}") from error


def check_choice(choice: str | None) -> None:
    """Raise ConfigError for a name that does not exist or a file that cannot be read."""
    if choice is not None and not is_name(choice):
        read_file(choice)


def absolute_choice(choice: str | None) -> str | None:
    """Return a file's absolute path, so that it works from every folder; names stay as they are."""
    if choice is None or choice in NAMES:
        return choice
    path = Path(choice).expanduser()
    return str(path.absolute()) if path.is_file() else choice


def flatten_parts() -> str:
    """Return the preamble that turns every message's content into text, with `<image>` on its own line for a
    image."""
    return _resource("flatten_parts")


def flatten_audios() -> str:
    """Return the preamble that turns every message's content into text, with AUDIO_TOKENS for an audio clip."""
    return _resource("flatten_audios")


def preamble(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the preamble for what the tokenizer has placeholders for: audio, else images and videos."""
    return flatten_audios() if AUDIO_TOKENS[1] in tokenizer.get_vocab() else flatten_parts()


def family_format(name: str) -> str:
    """Return the format of one of NAMES, for messages of plain text."""
    return _resource(name)


def named_template(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the complete template of one of NAMES, for plain or typed content.

    Raises:
        ConfigError: the tokenizer cannot even spell the format's special tokens.
    """
    lost = [token for token in missing_tokens(name, tokenizer) if not _can_spell(token, tokenizer)]
    if lost:
        raise ConfigError(
            f"--chat-template {name}: the tokenizer has no {', '.join(lost)} and cannot spell them from other tokens; "
            f"choose another template ({', '.join(n for n in NAMES if n not in SPECIAL_TOKENS)}), or add them to the "
            "tokenizer before the folder is built"
        )
    begins_with_bos = name in _OPEN_BEGINNING and _starts_with_bos(tokenizer)
    return preamble(tokenizer) + (_BOS if begins_with_bos else "") + family_format(name)


def missing_tokens(name: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the format's special tokens that are not single tokens in the tokenizer.

    They become plain text: the format still works, because EOS ends every answer, but it takes more tokens.
    """
    vocab = tokenizer.get_vocab()
    return [token for token in SPECIAL_TOKENS.get(name, ()) if token not in vocab]


def _can_spell(text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return bool(ids) and tokenizer.unk_token_id not in ids


def _starts_with_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer(_SAMPLE).input_ids[:1] == [bos]


def _resource(name: str) -> str:
    return files(__package__).joinpath(f"{name}.jinja").read_text(encoding="utf-8")
