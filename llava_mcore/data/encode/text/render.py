"""Turns -> text, by a chat template as transformers renders it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from llava_mcore.data.encode.marks import MARK_WITH_NEWLINES, TYPES, unescape
from llava_mcore.data.encode.text.spans import Span
from llava_mcore.data.samples import Turn
from llava_mcore.errors import DataError
from llava_mcore.templates import fixed_date
from llava_mcore.templates.bounded import RENDER_ERRORS

CONTENT_FORMATS = (
    {"system": "list", "user": "list", "assistant": "list"},
    {"system": "string", "user": "list", "assistant": "list"},
    {"system": "string", "user": "list", "assistant": "string"},
    {"system": "string", "user": "string", "assistant": "string"},
)
"""Formats of a message's content in templates: typed parts, or plain text. Tried in this order. Results of tools have
their own (`features.Features.tool_format`)."""
FLATTENED = {"system": "flat", "user": "flat", "assistant": "flat", "tool": "flat"}
"""Our own preamble, which turns typed parts into text: a template is rendered without it."""


def render_turns(
    turns: Sequence[Turn],
    template: str,
    formats: Mapping[str, str],
    *,
    media_tokens: Mapping[str, str],
    add_generation_prompt: bool,
    has_marks: bool,
    variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] = (),
    reasoning_key: str = "reasoning_content",
) -> tuple[str, list[Span]]:
    """Return the text of turns, and the spans that the template marks as generated (none without marks).

    Args:
        template: from `fixed_date.with_fixed_date`.
        formats: the content format of each role, see CONTENT_FORMATS.
        media_tokens: mark -> the tokenizer's placeholder; a mark without one stays as it is.
        variables: variables of the tokenizer, such as bos_token.
        tools: functions that the assistant may call.
        reasoning_key: the field in which the template expects what an assistant thinks.

    Raises:
        DataError: the template cannot render them.
    """
    messages = [
        {"role": t.role, "content": content(t, formats[t.role], media_tokens)}
        | dict(t.fields)
        | ({reasoning_key: t.reasoning} if t.reasoning else {})
        for t in turns
    ]
    try:
        texts, spans = render_jinja_template(
            conversations=[messages],
            tools=[dict(tool) for tool in tools] or None,
            chat_template=template,
            return_assistant_tokens_mask=has_marks,
            add_generation_prompt=add_generation_prompt,
            **fixed_date.VARIABLES,
            **variables,
        )
    except RENDER_ERRORS as error:
        said = str(error) or type(error).__name__
        raise DataError(f"the chat template cannot render the conversation: {said}") from error
    return texts[0], [(int(start), int(end)) for start, end in spans[0]] if spans else []


def content(turn: Turn, content_format: str, media_tokens: Mapping[str, str]) -> str | list[dict[str, str]]:
    """Return a turn's text in the template's format. In typed parts, line breaks next to a mark are the template's."""
    if content_format == "string":
        text = turn.text
        for mark, token in media_tokens.items():
            text = text.replace(mark, token)
        return unescape(text)
    # Every other piece is a mark.
    pieces = [(piece, index % 2 == 1) for index, piece in enumerate(MARK_WITH_NEWLINES.split(turn.text)) if piece]
    if content_format == "flat":
        return "\n".join(piece.strip("\n") if is_mark else unescape(piece) for piece, is_mark in pieces)
    parts = [
        {"type": TYPES[piece.strip("\n")]} if is_mark else {"type": "text", "text": unescape(piece)}
        for piece, is_mark in pieces
    ]
    return parts or [{"type": "text", "text": ""}]
