"""Conversations -> token ids and the mask of trained tokens, by the chat template of the checkpoint.

The start and end of an assistant's answer come from the template: from its `{% generation %}` marks if it has them,
else
from the difference between the prompt and the whole conversation. Token ids are never searched.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from llava_mcore.config.sections.data import Handling
from llava_mcore.data.encoding.chat_probe import ANSWER, QUESTION, find_content_format, probe, why_no_videos
from llava_mcore.data.encoding.marks import check_marks
from llava_mcore.data.encoding.text.around_media import rewritten
from llava_mcore.data.encoding.text.render import CONTENT_FORMATS, FLATTENED, render_turns
from llava_mcore.data.encoding.text.spans import Span, tokens_in_span
from llava_mcore.data.encoding.text.tokens import TextTokens
from llava_mcore.data.encoding.text.typed_tokens import TypedTokens
from llava_mcore.data.samples import AUDIO_MARK, IMAGE_MARK, VIDEO_MARK, Turn
from llava_mcore.errors import DataError
from llava_mcore.models.media import NOTHING_AROUND, AroundMedia
from llava_mcore.templates import fixed_date
from llava_mcore.templates.named import flatten_parts

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
TOKENS_FORMAT = 2
"""Incremented when the same turns, template and tokenizer would give different tokens than before."""


@dataclass(frozen=True)
class Closing:
    """The text that the template writes after an answer."""

    text: str
    """Everything after the answer; with generation marks, only the trained text after the marked part."""
    num_trained: int
    """Number of characters of `text` that are trained."""
    has_eos: bool
    """False: the EOS has to be added."""


class ChatFormat:
    """A tokenizer with a chat template. How the template works is determined once, by rendering a probe."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str,
        *,
        image_token: str | None,
        video_token: str | None = None,
        audio_token: str | None = None,
        special_tokens_in_text: Handling = "text",
        around_media: AroundMedia = NOTHING_AROUND,
    ):
        """`image_token`, `video_token` and `audio_token` are the tokenizer's placeholders for what may be in a
        conversation; None for what may not. There is one for pictures or for sound.

        special_tokens_in_text: how special tokens such as `<|im_end|>` in the text of a turn are read.
        around_media: what the class's processor rewrites in a rendered text.

        Raises DataError for a template whose answers cannot be distinguished from its prompts.
        """
        self.special_tokens_in_text = special_tokens_in_text
        self.image_token, self.video_token, self.audio_token = image_token, video_token, audio_token
        tokens = {IMAGE_MARK: image_token, VIDEO_MARK: video_token, AUDIO_MARK: audio_token}
        self._media_tokens = {mark: token for mark, token in tokens.items() if token is not None}
        self.media_ids = {
            mark: int(tokenizer.convert_tokens_to_ids(token)) for mark, token in self._media_tokens.items()
        }
        """Ids of the placeholders by mark."""
        self._main_mark = AUDIO_MARK if image_token is None else IMAGE_MARK
        self._around_media = around_media
        self._mark_ids = tokenizer.convert_tokens_to_ids(list(around_media.marks))
        self.eos_token = str(tokenizer.eos_token)
        self._bos_token = tokenizer.bos_token
        self._variables = tokenizer.special_tokens_map
        self.template = template
        self._body = template.removeprefix(flatten_parts())
        self._dated = fixed_date.with_fixed_date(self._body)
        # The fast tokenizer itself: it neither truncates nor pads, and encodes a text without starting threads,
        # which must not be running when loader processes are forked.
        self._encoder = tokenizer.backend_tokenizer
        self._encoder.no_truncation()
        self._encoder.no_padding()
        named = [t for t in tokenizer.special_tokens_map.values() if isinstance(t, str)]
        placeholders = self._media_tokens.values()
        self._typed = TypedTokens(self._encoder, [*named, *placeholders], marks=self._media_tokens.keys())
        self._has_marks = GENERATION_MARK.search(template) is not None
        formats = CONTENT_FORMATS if self._body == self.template else (FLATTENED,)
        main = self._media_tokens[self._main_mark]
        self.content_format = find_content_format(self._text, formats, self._main_mark, main)
        self._closing = self._probe_marked() if self._has_marks else self._probe_unmarked()
        self._check_tokens()

    # -- rendering ---------------------------------------------------------------------------------------------

    def render(self, turns: Sequence[Turn], *, add_generation_prompt: bool = False) -> str:
        """Return the rendered turns, with one placeholder per picture, video and sound.

        It ends with the answer's header if `add_generation_prompt`.
        """
        return self._render(turns, self.content_format, add_generation_prompt)[0]

    def _render(self, turns: Sequence[Turn], formats: dict[str, str], prompt: bool) -> tuple[str, list[Span]]:
        return render_turns(
            turns,
            self._dated,
            formats,
            media_tokens=self._media_tokens,
            add_generation_prompt=prompt,
            has_marks=self._has_marks,
            variables=self._variables,
        )

    @property
    def adds_eos(self) -> bool:
        """Whether an EOS is added to answers because the template does not write it."""
        return not self._closing.has_eos

    # -- determining how the template works ---------------------------------------------------------------------

    def _text(self, turns: Sequence[Turn], formats: dict[str, str]) -> str:
        return self._render(turns, formats, False)[0]

    @cached_property
    def several_turns(self) -> str | None:
        """Why conversations with several questions cannot be used with this template; None: they can."""
        try:
            self.segments([*self._probe(), Turn("user", QUESTION), Turn("assistant", ANSWER)])
        except DataError as error:
            return str(error)
        return None

    @cached_property
    def no_videos(self) -> str | None:
        """Why conversations with videos cannot be used with this template; None: they can."""
        if self.video_token is None:
            return "there is no placeholder for a video"
        return why_no_videos(self._text, self.content_format, self.video_token)

    def _probe(self) -> list[Turn]:
        return probe(self._main_mark)

    def _probe_unmarked(self) -> Closing:
        text, spans = self._difference_spans(self._probe())
        _, found, closing = text[slice(*spans[0])].partition(ANSWER)
        if not found:
            raise DataError(f"the chat template ends its prompt after the answer; add {{% generation %}}: {text!r}")
        before, eos, _ = closing.partition(self.eos_token)
        trained = before + eos if eos else closing.rstrip()
        return Closing(closing, len(trained), bool(eos))

    def _probe_marked(self) -> Closing:
        text, spans = self._render(self._probe(), self.content_format, False)
        if len(spans) != 1 or ANSWER not in text[slice(*spans[0])]:
            raise DataError(f"the chat template's {{% generation %}} does not contain the answer: {text!r}")
        start, end = spans[0]
        if self.eos_token in text[start:end].partition(ANSWER)[2]:
            return Closing("", 0, True)
        before, eos, _ = text[end:].partition(self.eos_token)
        closing = before + eos if eos else ""
        return Closing(closing, len(closing), bool(eos))

    def _check_tokens(self) -> None:
        """Check that special tokens are tokens, and that the tokenizer appends nothing to texts."""
        found = self.tokens(self._probe(), {self._main_mark: 1})
        eos_id = self._encoder.token_to_id(self.eos_token)
        if eos_id not in found.ids[found.trained]:
            raise DataError(f"the tokenizer does not turn {self.eos_token} after an answer into its EOS id {eos_id}")
        if self._adds_special_tokens(self.render(self._probe())):
            added = self._encoder.encode("a", add_special_tokens=True)
            if added.special_tokens_mask[-1]:
                raise DataError(
                    f"the tokenizer ends every text, so every prompt too, with {added.tokens[-1]}; "
                    "remove it from post_processor in tokenizer.json, or start the chat template with bos_token"
                )

    # -- conversations ------------------------------------------------------------------------------------------

    def _marked_spans(self, turns: Sequence[Turn]) -> tuple[str, list[Span]]:
        text, spans = self._render(turns, self.content_format, False)
        num_answers = sum(turn.role == "assistant" for turn in turns)
        if len(spans) != num_answers:
            raise DataError(f"the chat template marks {len(spans)} answers of a conversation with {num_answers}")
        closing = self._closing.text
        if not all(text.startswith(closing, end) for _, end in spans):
            raise DataError(f"the chat template does not close every answer with {closing!r}")
        return text, [(start, end + len(closing)) for start, end in spans]

    def _difference_spans(self, turns: Sequence[Turn]) -> tuple[str, list[Span]]:
        """Return the spans from the end of each answer's prompt to the end of its turn."""
        text = self.render(turns)
        spans = []
        for index, turn in enumerate(turns):
            if turn.role != "assistant":
                continue
            prompt = self.render(turns[:index], add_generation_prompt=True)
            upto = self.render(turns[: index + 1])
            if not (upto.startswith(prompt) and text.startswith(upto)):
                raise DataError(
                    "the chat template does not start a conversation with its prompt; add {% generation %} to it "
                    f"(prompt {prompt!r}, conversation {text!r})"
                )
            spans.append((len(prompt), len(upto)))
        return text, spans

    def _unmarked_spans(self, turns: Sequence[Turn]) -> tuple[str, list[Span]]:
        text, spans = self._difference_spans(turns)
        closing = self._closing
        if not all(text[start:end].endswith(closing.text) for start, end in spans):
            raise DataError(f"the chat template does not close every answer with {closing.text!r}")
        num_dropped = len(closing.text) - closing.num_trained
        return text, [(start, end - num_dropped) for start, end in spans]

    def segments(self, turns: Sequence[Turn]) -> tuple[str, list[Span]]:
        """Return the text of a conversation with every EOS, and the spans of it that are trained.

        An EOS that the template lacks is added after the last visible character of the answer's turn.
        """
        text, spans = self._marked_spans(turns) if self._has_marks else self._unmarked_spans(turns)
        if self._closing.has_eos:
            return text, spans
        result, done, moved = "", 0, []
        for start, end in spans:
            end = start + len(text[start:end].rstrip())
            shift = len(result) - done
            result += text[done:end] + self.eos_token
            moved.append((start + shift, len(result)))
            done = end
        return result + text[done:], moved

    def text_tokens(self, turns: Sequence[Turn], *, num_images: int, num_videos: int = 0) -> TextTokens:
        """As `tokens`, of a conversation without sounds."""
        return self.tokens(turns, {IMAGE_MARK: num_images, VIDEO_MARK: num_videos})

    def tokens(self, turns: Sequence[Turn], media: Mapping[str, int]) -> TextTokens:
        """Tokenize a conversation as Hugging Face's processor does, but with one placeholder per picture, video and
        sound.

        The answers are marked with their EOS. Raises DataError if marks do not match `media`, which are numbers by
        mark, or the template cannot render the turns.
        """
        check_marks(turns, media)
        typed = self.typed_in(turns)
        hidden = bool(typed) and self.special_tokens_in_text == "text"
        if hidden:
            turns = [replace(turn, text=self._typed.hide(turn.text)) for turn in turns]
        text, spans = rewritten(*self.segments(turns), self._around_media)
        encoding, ids, is_media = self._encoded(text, media, hidden=hidden)
        trained = np.zeros(len(ids), dtype=np.bool_)
        for span in spans:
            trained[tokens_in_span(encoding, span, len(text))] = True
        return TextTokens(ids, trained & ~is_media, typed)

    def prompt_text(self, turns: Sequence[Turn]) -> str:
        """Return the text that is answered next: turns that end with a question, then the header of its answer.

        Answers before have the EOS that training has seen. Raises DataError if the template cannot render the turns.
        """
        text = self.render(turns, add_generation_prompt=True)
        answers = [index for index, turn in enumerate(turns) if turn.role == "assistant"]
        if self._closing.has_eos or not answers:
            return text
        answered = turns[: answers[-1] + 1]
        plain = self.render(answered)
        if not text.startswith(plain):
            raise DataError(f"the chat template does not start a prompt with the answers before: {text!r}")
        return self.segments(answered)[0] + text[len(plain) :]

    def prompt_tokens(self, turns: Sequence[Turn], media: Mapping[str, int]) -> TextTokens:
        """Tokenize `prompt_text` as `tokens` does a conversation; nothing is trained. DataError like `tokens`."""
        check_marks(turns, media)
        typed = self.typed_in(turns)
        hidden = bool(typed) and self.special_tokens_in_text == "text"
        if hidden:
            turns = [replace(turn, text=self._typed.hide(turn.text)) for turn in turns]
        text, _ = rewritten(self.prompt_text(turns), [], self._around_media)
        _, ids, _ = self._encoded(text, media, hidden=hidden)
        return TextTokens(ids, np.zeros(len(ids), dtype=np.bool_), typed)

    def _encoded(
        self, text: str, media: Mapping[str, int], *, hidden: bool
    ) -> tuple[Encoding, NDArray[np.int64], NDArray[np.bool_]]:
        """Return a rendered text's encoding, its ids, and which of them are placeholders.

        Args:
            media: numbers of pictures, videos and sounds by mark.
            hidden: whether the special tokens that were typed in the turns are hidden in the text.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"the text contains an invalid character: {error}") from error
        encode = self._typed.encode if hidden else self._encoder.encode
        encoding = encode(text, add_special_tokens=self._adds_special_tokens(text))
        ids = np.asarray(encoding.ids, dtype=np.int64)
        for mark, token_id in self.media_ids.items():
            left, number = int((ids == token_id).sum()), media.get(mark, 0)
            if left != number:
                token = self._media_tokens[mark]
                raise DataError(f"the chat template leaves {left} of {number} {token}: {text!r:.2000}")
        return encoding, ids, np.isin(ids, [*self.media_ids.values(), *self._mark_ids])

    def typed_in(self, turns: Sequence[Turn]) -> tuple[str, ...]:
        """Return the special tokens in the text of turns, except marks."""
        found: set[str] = set()
        for turn in turns:
            found |= self._typed.found_in(turn.text)
        return tuple(sorted(found))

    def special_in(self, text: str) -> tuple[str, ...]:
        """Return the special tokens in a text, placeholders of pictures and videos too."""
        placeholders = [token for token in (self.image_token, self.video_token) if token is not None and token in text]
        return tuple(sorted({*self._typed.found_in(text), *placeholders}))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that `text_tokens` depends on except the turns."""
        tokenizer = json.loads(self._encoder.to_str())
        settings = [TOKENS_FORMAT, tokenizer, self.template, self.image_token, self.eos_token, self._variables]
        if self.video_token is not None:
            settings.append(self.video_token)
        if self._around_media.rules:
            settings.append(asdict(self._around_media))
        if self.audio_token is not None:
            settings.append({AUDIO_MARK: self.audio_token})
        if self.special_tokens_in_text != "text":
            settings.append(self.special_tokens_in_text)
        if fixed_date.asks_for_date(self.template):
            settings.append(str(fixed_date.TODAY))
        text = json.dumps(settings, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def _adds_special_tokens(self, text: str) -> bool:
        """Hugging Face's processors add BOS and other tokens unless the template has written BOS itself."""
        return self._bos_token is None or not text.startswith(self._bos_token)
