"""The chat template: one that takes plain strings and lists of image and text parts alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from llava_mcore.build.language import IMAGE_TOKEN
from llava_mcore.build.options import Say
from llava_mcore.errors import ConfigError, ConversionError

# Turns every message whose content is a list of parts into one whose content is a string, then lets the text model's
# own template see only strings. The final block ends without a dash: nothing of that template may be stripped.
FLATTEN_PARTS = """\
{#- Pictures: a list of parts becomes one string, a picture being <image> on a line of its own. -#}
{%- set llava = namespace(messages=[], text='') -%}
{%- for message in messages -%}
{%- if message.content is defined and message.content is sequence and message.content is not string -%}
{%- set llava.text = '' -%}
{%- for part in message.content -%}
{%- if not loop.first and (part.type != 'text' or loop.previtem.type != 'text') -%}
{%- set llava.text = llava.text + '\\n' -%}
{%- endif -%}
{%- if part.type == 'image' -%}
{%- set llava.text = llava.text + '<image>' -%}
{%- elif part.type == 'text' -%}
{%- set llava.text = llava.text + part.text -%}
{%- else -%}
{{- raise_exception('a part of a message is text or image, not ' ~ part.type) -}}
{%- endif -%}
{%- endfor -%}
{%- set llava.messages = llava.messages + [dict(message, content=llava.text)] -%}
{%- else -%}
{%- set llava.messages = llava.messages + [message] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = llava.messages %}
"""

PLAIN = """\
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{{- message.content + '\\n' -}}
{%- elif message.role == 'user' -%}
{{- 'USER: ' + message.content + ' ' -}}
{%- elif message.role == 'assistant' -%}
{{- 'ASSISTANT:' -}}
{%- generation -%}
{{- ' ' + message.content + eos_token -}}
{%- endgeneration -%}
{%- else -%}
{{- raise_exception('a role is system, user or assistant, not ' ~ message.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- 'ASSISTANT:' -}}
{%- endif -%}
"""
"""For a language model that was never taught to chat. The EOS is part of the answer, so that it is trained."""

_TEXT = "What does 7f3a show?"
_ANSWER = "A 9c1e."


def choose_template(tokenizer: PreTrainedTokenizerBase, file: Path | None, say: Say) -> str:
    """Return the template to save: from `file`, else the tokenizer's own, else the plain one.

    A template that does not understand lists of parts gets a preamble that flattens them; it stays unchanged itself.

    Raises:
        ConfigError: `file` cannot be read.
        ConversionError: the template cannot say a question and its answer, with or without a picture.
    """
    if file is not None:
        template, origin = _read(file), str(file)
    elif tokenizer.chat_template:
        template, origin = _own_template(tokenizer), "the text model's tokenizer"
    else:
        template, origin = plain_template(tokenizer), "the plain USER: … ASSISTANT: … one; the tokenizer has none"
    if understands_parts(tokenizer, template):
        say(f"chat template: {origin}, unchanged")
        return template
    wrapped = FLATTEN_PARTS + template
    _check_wrapped(tokenizer, template, wrapped, origin)
    say(f"chat template: {origin}, after a preamble that turns image and text parts into a string")
    return wrapped


def plain_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the default template, which begins with BOS if the tokenizer begins its texts so."""
    starts_with_bos = tokenizer.bos_token_id is not None and tokenizer(_TEXT).input_ids[:1] == [tokenizer.bos_token_id]
    return ("{{- bos_token -}}\n" if starts_with_bos else "") + PLAIN


def understands_parts(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Tell whether a template renders parts and strings, a picture as one `<image>`."""
    try:
        parts = _render(tokenizer, template, _conversation(as_parts=True))
        text = _render(tokenizer, template, _conversation(as_parts=False))
    except (TemplateError, TypeError):
        return False
    return parts.count(IMAGE_TOKEN) == 1 and all(_is_said(rendered) for rendered in (parts, text))


def _check_wrapped(tokenizer: PreTrainedTokenizerBase, template: str, wrapped: str, origin: str) -> None:
    """Raise ConversionError unless the wrapped template does to parts what the original does to strings."""
    text = _conversation(as_parts=False)
    try:
        expected = _render(tokenizer, template, text)
        made = [_render(tokenizer, wrapped, c) for c in (text, _conversation(as_parts=True))]
    except (TemplateError, TypeError) as error:
        raise ConversionError(
            f"chat template ({origin}): cannot render a question about a picture and its answer: {error}\n"
            "Give another one with --chat-template FILE."
        ) from error
    if made != [expected, expected] or not _is_said(expected) or expected.count(IMAGE_TOKEN) != 1:
        raise ConversionError(
            f"chat template ({origin}): the question, its picture or the answer is missing from what it renders: "
            f"{expected!r}\nGive another one with --chat-template FILE."
        )


def _is_said(rendered: str) -> bool:
    """Tell whether question and answer appear as text, not as the printed form of a list."""
    return _TEXT in rendered and _ANSWER in rendered and "'type'" not in rendered


def _conversation(*, as_parts: bool) -> list[dict[str, Any]]:
    """Return a question about a picture and its answer."""
    if not as_parts:
        question, answer = f"{IMAGE_TOKEN}\n{_TEXT}", _ANSWER
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    parts = [{"type": "image"}, {"type": "text", "text": _TEXT}]
    return [{"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": _ANSWER}]}]


def _render(tokenizer: PreTrainedTokenizerBase, template: str, conversation: list[dict[str, Any]]) -> str:
    return str(tokenizer.apply_chat_template(conversation, chat_template=template, tokenize=False))


def _own_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the tokenizer's template; of several named ones, the default."""
    template = tokenizer.chat_template
    if isinstance(template, str):
        return template
    if "default" not in template:
        raise ConversionError(
            f"the tokenizer has chat templates {', '.join(sorted(template))}, none of them 'default': "
            "give one with --chat-template FILE"
        )
    return str(template["default"])


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {file}: cannot be read: {error}") from error
