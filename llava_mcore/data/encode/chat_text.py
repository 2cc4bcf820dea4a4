"""The text of conversations, rendered by a chat template, and the spans of it that are trained.

The start and end of an assistant's answer come from the template: from its `{% generation %}` marks if it has them,
else from the difference between the prompt and the whole conversation. Token ids are never searched.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llava_mcore.data.encode.record_keys import REASONING_KEYS
from llava_mcore.data.encode.render import (
    ANSWER,
    CONTENT_FORMATS,
    FLATTENED,
    QUESTION,
    Features,
    find_content_format,
    probe,
    render_turns,
    why_no_videos,
)
from llava_mcore.data.encode.tokens import Span
from llava_mcore.data.samples import AUDIO_MARK, IMAGE_MARK, VIDEO_MARK, Turn
from llava_mcore.errors import DataError
from llava_mcore.templates import fixed_date
from llava_mcore.templates.named import flatten_parts

Tools = Sequence[Mapping[str, Any]]
GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Closing:
    """The text that the template writes after an answer."""

    text: str
    """Everything after the answer; with generation marks, only the trained text after the marked part."""
    num_trained: int
    """Number of characters of `text` that are trained."""
    has_eos: bool
    """False: the EOS has to be added."""
    own_text: str
    """Visible text that the template itself writes between the prompt and a plain answer, and that is trained."""


class ChatText:
    """A chat template. How it works is determined once, by rendering a probe."""

    def __init__(
        self,
        template: str,
        *,
        media_tokens: Mapping[str, str],
        eos_token: str,
        variables: Mapping[str, str | list[str]],
    ) -> None:
        """
        Args:
            media_tokens: the placeholders of media that a conversation may have, by mark.
            variables: variables of the template: the tokenizer's special tokens.

        Raises:
            DataError: answers cannot be distinguished from prompts.
        """
        self._media_tokens = dict(media_tokens)
        self._main_mark = IMAGE_MARK if IMAGE_MARK in media_tokens else AUDIO_MARK
        self.eos_token, self._variables = eos_token, dict(variables)
        self.template = template
        self._body = template.removeprefix(flatten_parts())
        self._dated = fixed_date.with_fixed_date(self._body)
        self._has_marks = GENERATION_MARK.search(template) is not None
        formats = CONTENT_FORMATS if self._body == self.template else (FLATTENED,)
        self.features = Features(self._render_feature, ("string", "list") if len(formats) > 1 else ("flat",))
        main = self._media_tokens[self._main_mark]
        self.content_format = find_content_format(self._text, formats, self._main_mark, main)
        self._closing = self._probe_marked() if self._has_marks else self._probe_unmarked()

    def render(self, turns: Sequence[Turn], tools: Tools = (), *, add_generation_prompt: bool = False) -> str:
        """Return the rendered turns, with one placeholder per image, video and audio clip.

        It ends with the answer's header if `add_generation_prompt`.
        """
        return self._render(turns, self.content_format, add_generation_prompt, tools)[0]

    def _render(
        self, turns: Sequence[Turn], formats: Mapping[str, str], prompt: bool, tools: Tools = (), key: str | None = None
    ) -> tuple[str, list[Span]]:
        """Render turns. `key`: that of reasonings, if it is tried."""
        if "tool" not in formats and any(turn.role == "tool" for turn in turns):
            formats = {**formats, "tool": self.features.tool_format or "string"}
        if key is None and any(turn.reasoning for turn in turns):
            key = self.features.reasoning_key
        return render_turns(
            turns,
            self._dated,
            formats,
            media_tokens=self._media_tokens,
            add_generation_prompt=prompt,
            has_marks=self._has_marks,
            variables=self._variables,
            tools=tools,
            reasoning_key=key or REASONING_KEYS[0],
        )

    def _render_feature(self, turns: Sequence[Turn], tools: Tools, tool_format: str, reasoning_key: str) -> str:
        return self._render(turns, {**self.content_format, "tool": tool_format}, False, tools, reasoning_key)[0]

    @property
    def adds_eos(self) -> bool:
        """Whether an EOS is added to answers because the template does not write it."""
        return not self._closing.has_eos

    def _text(self, turns: Sequence[Turn], formats: dict[str, str]) -> str:
        return self._render(turns, formats, False)[0]

    @cached_property
    def several_turns(self) -> str | None:
        """Why this template cannot render conversations with several questions; None if it can."""
        try:
            self.segments([*self._probe(), Turn("user", QUESTION), Turn("assistant", ANSWER)])
        except DataError as error:
            return str(error)
        return None

    @cached_property
    def no_videos(self) -> str | None:
        """Why this template cannot render conversations with videos; None if it can."""
        if VIDEO_MARK not in self._media_tokens:
            return "there is no placeholder for a video"
        return why_no_videos(self._text, self.content_format, self._media_tokens[VIDEO_MARK])

    def _probe(self) -> list[Turn]:
        return probe(self._main_mark)

    def _probe_unmarked(self) -> Closing:
        text, spans = self._difference_spans(self._probe())
        own_text, separator, closing = text[slice(*spans[0])].partition(ANSWER)
        if not separator:
            raise DataError(f"the chat template ends its prompt after the answer; add {{% generation %}}: {text!r}")
        before, eos, _ = closing.partition(self.eos_token)
        trained = before + eos if eos else closing.rstrip()
        return Closing(closing, len(trained), bool(eos), own_text.strip())

    def _probe_marked(self) -> Closing:
        text, spans = self._render(self._probe(), self.content_format, False)
        if len(spans) != 1 or ANSWER not in text[slice(*spans[0])]:
            raise DataError(f"the chat template's {{% generation %}} does not contain the answer: {text!r}")
        start, end = spans[0]
        own_text = text[start:end].partition(ANSWER)[0].strip()
        if self.eos_token in text[start:end].partition(ANSWER)[2]:
            return Closing("", 0, True, own_text)
        before, eos, _ = text[end:].partition(self.eos_token)
        closing = before + eos if eos else ""
        return Closing(closing, len(closing), bool(eos), own_text)

    @property
    def own_text(self) -> str:
        """Visible text that the template writes into the trained span of a plain answer, such as an empty thought."""
        return self._closing.own_text

    @property
    def own_text_warning(self) -> str | None:
        """A warning about `own_text`; None if there is none."""
        if not self.own_text:
            return None
        advice = " give answers a reasoning_content," if self.features.reasoning_key is not None else ""
        return (
            f"the chat template itself writes {self.own_text!r} before an answer that does not bring it, and the model "
            f"is trained to write it too:{advice} or choose another --chat-template if that is not intended"
        )

    def _marked_spans(self, turns: Sequence[Turn], tools: Tools) -> tuple[str, list[Span]]:
        text, spans = self._render(turns, self.content_format, False, tools)
        num_answers = sum(turn.role == "assistant" for turn in turns)
        if len(spans) != num_answers:
            raise DataError(f"the chat template marks {len(spans)} answers of a conversation with {num_answers}")
        closing = self._closing.text
        if not all(text.startswith(closing, end) for _, end in spans):
            raise DataError(f"the chat template does not close every answer with {closing!r}")
        return text, [(start, end + len(closing)) for start, end in spans]

    def _difference_spans(
        self, turns: Sequence[Turn], tools: Tools = (), *, all_answers: bool = False
    ) -> tuple[str, list[Span]]:
        """Return the spans from the end of each answer's prompt to the end of its turn: of trained answers, or all."""
        text = self.render(turns, tools)
        spans = []
        for index, turn in enumerate(turns):
            if turn.role != "assistant" or not (turn.trained or all_answers):
                continue
            prompt = self.render(turns[:index], tools, add_generation_prompt=True)
            upto = self.render(turns[: index + 1], tools)
            if not (upto.startswith(prompt) and text.startswith(upto)):
                raise DataError(
                    "the chat template does not start a conversation with its prompt; add {% generation %} to it "
                    f"(prompt {prompt!r}, conversation {text!r})"
                )
            spans.append((len(prompt), len(upto)))
        return text, spans

    def _unmarked_spans(self, turns: Sequence[Turn], tools: Tools) -> tuple[str, list[Span]]:
        text, spans = self._difference_spans(turns, tools, all_answers=self.adds_eos)
        closing = self._closing
        if not all(text[start:end].endswith(closing.text) for start, end in spans):
            raise DataError(f"the chat template does not close every answer with {closing.text!r}")
        num_dropped = len(closing.text) - closing.num_trained
        return text, [(start, end - num_dropped) for start, end in spans]

    def segments(self, turns: Sequence[Turn], tools: Tools = ()) -> tuple[str, list[Span]]:
        """Return the text of a conversation with every EOS, and the spans of it that are trained.

        An EOS that the template lacks is added after the last visible character of the answer's turn, also if that
        answer is not trained: serving has shown it too.

        Raises DataError if the template cannot render all of it.
        """
        self.features.check(turns, tools)
        spans_of = self._marked_spans if self._has_marks else self._unmarked_spans
        text, spans = spans_of(turns, tools)
        if self.adds_eos:
            text, spans = self._with_eos(text, spans)
        answers = [turn for turn in turns if turn.role == "assistant"]
        if len(spans) == len(answers):
            spans = [span for span, turn in zip(spans, answers, strict=True) if turn.trained]
        return text, spans

    def _with_eos(self, text: str, spans: Sequence[Span]) -> tuple[str, list[Span]]:
        """Return the text with an EOS at the end of each span, and the spans with it."""
        result, done, moved = "", 0, []
        for start, end in spans:
            end = start + len(text[start:end].rstrip())
            shift = len(result) - done
            result += text[done:end] + self.eos_token
            moved.append((start + shift, len(result)))
            done = end
        return result + text[done:], moved

    def prompt_text(self, turns: Sequence[Turn], tools: Tools = ()) -> str:
        """Return the text that is answered next: turns that end with a question, then the header of its answer.

        Answers before have the EOS that training has seen. Raises DataError if the template cannot render the turns.
        """
        self.features.check(turns, tools)
        text = self.render(turns, tools, add_generation_prompt=True)
        answers = [index for index, turn in enumerate(turns) if turn.role == "assistant"]
        if self._closing.has_eos or not answers:
            return text
        answered = turns[: answers[-1] + 1]
        plain = self.render(answered, tools)
        if not text.startswith(plain):
            raise DataError(f"the chat template does not start a prompt with the answers before: {text!r}")
        return self.segments(answered, tools)[0] + text[len(plain) :]
