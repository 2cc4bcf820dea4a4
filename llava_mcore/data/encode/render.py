"""Turns -> text, by a chat template as transformers renders it. Probes find out what a template can render."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from llava_mcore.data.encode.marks import MARK_WITH_NEWLINES, NAMES, TYPES, unescape
from llava_mcore.data.encode.record_keys import REASONING_KEYS
from llava_mcore.data.encode.tokens import Span
from llava_mcore.data.samples import IMAGE_MARK, VIDEO_MARK, Turn
from llava_mcore.errors import DataError, with_article
from llava_mcore.templates import fixed_date
from llava_mcore.templates.bounded import RENDER_ERRORS

QUESTION, ANSWER, SYSTEM = "probe-question-q7", "probe-answer-a7", "probe-system-s7"
Render = Callable[[Sequence[Turn], dict[str, str]], str]
"""Turns and the content format of each role (see `text.render.CONTENT_FORMATS`) -> text."""


def probe(mark: str = IMAGE_MARK) -> list[Turn]:
    """Return a question about an image, a video or an audio clip, and its answer."""
    return [Turn("user", f"{mark}\n{QUESTION}"), Turn("assistant", ANSWER)]


def find_content_format(render: Render, formats: Iterable[dict[str, str]], mark: str, token: str) -> dict[str, str]:
    """Return the first format that the template supports, preferably with a system prompt.

    Args:
        mark: of an image, or of an audio clip for a class that takes audio alone.
        token: its placeholder.

    Raises DataError if it does not support any.
    """
    possible, reasons = [], []
    for candidate in formats:
        try:
            text = render(probe(mark), candidate)
        except DataError as error:
            reasons.append(str(error))
            continue
        if _is_said(text, token):
            possible.append(candidate)
        else:
            reasons.append(f"typed or plain content {candidate} renders as {text!r}")
    if possible:
        return next((candidate for candidate in possible if _says_system(render, candidate, mark)), possible[0])
    raise DataError(
        f"the chat template renders a question with {with_article(NAMES[mark])} neither from typed parts nor "
        f"from text with {token}: " + "; ".join(dict.fromkeys(reasons))
    )


def why_no_videos(render: Render, content_format: dict[str, str], video_token: str) -> str | None:
    """Return why the template cannot render a question about a video; None if it can."""
    try:
        text = render(probe(VIDEO_MARK), content_format)
    except DataError as error:
        return str(error)
    if _is_said(text, video_token):
        return None
    return f"the chat template renders a question about a video as {text!r}, where one {video_token} is needed"


def _is_said(text: str, placeholder: str) -> bool:
    """Return whether the text contains each part of the probe once, and not as a printed Python list."""
    return all(text.count(part) == 1 for part in (placeholder, QUESTION, ANSWER)) and "'type':" not in text


def _says_system(render: Render, content_format: dict[str, str], mark: str) -> bool:
    """Return whether a system prompt is rendered; a template may not support it."""
    try:
        text = render([Turn("system", SYSTEM), *probe(mark)], content_format)
    except DataError:
        return False
    return text.count(SYSTEM) == 1 and "'type':" not in text


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
        # Fields of a turn, such as calls of tools, are handed over as they are.
        {"role": t.role, "content": content(t, formats[t.role], media_tokens)}
        | dict(t.fields)
        | ({reasoning_key: t.reasoning} if t.reasoning else {})
        for t in turns
    ]
    try:
        # transformers' own renderer, as its processors use it.
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


TOOL, CALL, RESULT, THOUGHT = "probe_tool_t7", "probe_call_c7", "probe-result-r7", "probe-thought-h7"
FeatureRender = Callable[[Sequence[Turn], Sequence[Mapping[str, Any]], str, str], str]
"""Turns, tools, the format of a tool's results ("string" or "list") and the key of the reasoning -> text."""
_TOOLS = ({"type": "function", "function": {"name": TOOL, "description": "", "parameters": {"type": "object"}}},)
_CALL = {"type": "function", "function": {"name": CALL, "arguments": {}}}


class Features:
    """Optional features of a template; each is probed once, when it is needed."""

    def __init__(self, render: FeatureRender, formats: Sequence[str]) -> None:
        """formats: those that the results of tools may have."""
        self._render, self._formats = render, formats

    @cached_property
    def tool_format(self) -> str | None:
        """The format of a tool's results; None if the template does not render them."""
        return next((format_ for format_ in self._formats if self._says(RESULT, self._called(), format_)), None)

    @cached_property
    def reasoning_key(self) -> str | None:
        """The field in which the template expects the reasoning of an answer; None if it does not render any."""
        turns = [Turn("user", QUESTION), Turn("assistant", ANSWER, reasoning=THOUGHT)]
        return next((key for key in REASONING_KEYS if self._says(THOUGHT, turns, reasoning_key=key)), None)

    @cached_property
    def _takes_tools(self) -> bool:
        turns = [Turn("user", QUESTION), Turn("assistant", ANSWER)]
        return self._says(TOOL, turns, tools=_TOOLS)

    @cached_property
    def _takes_calls(self) -> bool:
        turns = self._called()
        return self._says(CALL, turns[:2]) or (self.tool_format is not None and self._says(CALL, turns))

    def check(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> None:
        """Raise DataError for tools, calls and results that the template would drop."""
        lost = []
        if tools and not self._takes_tools:
            lost.append("tools")
        if any("tool_calls" in turn.fields for turn in turns) and not self._takes_calls:
            lost.append("tool_calls")
        if any(turn.role == "tool" for turn in turns) and self.tool_format is None:
            lost.append("results of tools (role tool)")
        if lost:
            raise DataError(f"the chat template does not render {' and '.join(lost)}; choose another --chat-template")

    def loses_reasoning(self, turns: Sequence[Turn]) -> bool:
        """Return whether answers have a reasoning that the template drops."""
        return any(turn.reasoning for turn in turns) and self.reasoning_key is None

    def _called(self) -> list[Turn]:
        """Return a question, a call of a tool, its result and the answer."""
        call = Turn("assistant", "", fields={"tool_calls": [_CALL]})
        return [Turn("user", QUESTION), call, Turn("tool", RESULT), Turn("assistant", ANSWER)]

    def _says(
        self,
        text: str,
        turns: Sequence[Turn],
        tool_format: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        reasoning_key: str = REASONING_KEYS[0],
    ) -> bool:
        try:
            rendered = self._render(turns, tools, tool_format or self._formats[0], reasoning_key)
        except DataError:
            return False
        return text in rendered and "'type': 'text'" not in rendered
