"""The features of a chat template besides text: tools, calls of them, results, reasoning. Detected by rendering it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from llava_mcore.data.encode.record_keys import REASONING_KEYS
from llava_mcore.data.encode.text.chat_probe import ANSWER, QUESTION
from llava_mcore.data.samples import Turn
from llava_mcore.errors import DataError

TOOL, CALL, RESULT, THOUGHT = "probe_tool_t7", "probe_call_c7", "probe-result-r7", "probe-thought-h7"
Render = Callable[[Sequence[Turn], Sequence[Mapping[str, Any]], str, str], str]
"""Turns, tools, the format of a tool's results ("string" or "list") and the key of the reasoning -> text."""
_TOOLS = ({"type": "function", "function": {"name": TOOL, "description": "", "parameters": {"type": "object"}}},)
_CALL = {"type": "function", "function": {"name": CALL, "arguments": {}}}


class Features:
    """Features of one template; each is tried once, when it is needed."""

    def __init__(self, render: Render, formats: Sequence[str]) -> None:
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
