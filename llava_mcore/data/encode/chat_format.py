"""Conversations -> token ids and the mask of trained tokens, by the chat template of the checkpoint."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from llava_mcore.config.sections.data import Handling
from llava_mcore.data.encode.chat_text import ChatText, Tools
from llava_mcore.data.encode.marks import MARK_ADVICE, TYPES, as_text, check_marks, count_marks, escape, unescape
from llava_mcore.data.encode.special_tokens import TypedTokens
from llava_mcore.data.encode.tokens import Span, TextTokens, tokens_in_span
from llava_mcore.data.samples import AUDIO_MARK, IMAGE_MARK, VIDEO_MARK, Turn
from llava_mcore.errors import DataError
from llava_mcore.media.media import NOTHING_AROUND, AroundMedia
from llava_mcore.templates import fixed_date

TOKENS_FORMAT = 2
"""Incremented when the same turns, template and tokenizer would give different tokens than before."""


class ChatFormat(ChatText):
    """A tokenizer with a chat template: the tokens of its texts."""

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
        """`image_token`, `video_token` and `audio_token` are the tokenizer's placeholders; None for media that a
        conversation may not have. There is one for images or one for audio.

        special_tokens_in_text: how special tokens such as `<|im_end|>` in the text of a turn are read.
        around_media: how the class's processor rewrites the rendered text.

        Raises DataError for a template whose answers cannot be distinguished from its prompts.
        """
        # What a text may contain, and how the template renders it.
        self.special_tokens_in_text = special_tokens_in_text
        self.image_token, self.video_token, self.audio_token = image_token, video_token, audio_token
        tokens = {IMAGE_MARK: image_token, VIDEO_MARK: video_token, AUDIO_MARK: audio_token}
        super().__init__(
            template,
            media_tokens={mark: token for mark, token in tokens.items() if token is not None},
            eos_token=str(tokenizer.eos_token),
            variables=tokenizer.special_tokens_map,
        )
        # Ids by which placeholders and their neighbors are recognized in tokenized text.
        self.media_ids = {
            mark: int(tokenizer.convert_tokens_to_ids(token)) for mark, token in self._media_tokens.items()
        }
        """Ids of the placeholders by mark."""
        self.mark_advice = {token: MARK_ADVICE[m] for m, token in self._media_tokens.items() if token != m}
        """The advice for each placeholder that is not a mark, such as `<|image_pad|>`: which mark to write instead."""
        self.literal_marks = tuple(mark for mark in TYPES if mark not in self._media_tokens)
        """Marks of media that the class does not take: they are text, such as `<video>` in a text about HTML."""
        self._around_media = around_media
        self._mark_ids = tokenizer.convert_tokens_to_ids(list(around_media.marks))
        self._bos_token = tokenizer.bos_token
        # The fast tokenizer itself: it neither truncates nor pads, and encodes a text without starting threads,
        # which must not be running when loader processes are forked.
        self._encoder = tokenizer.backend_tokenizer
        self._encoder.no_truncation()
        self._encoder.no_padding()
        # Special tokens that were typed must not be taken for the template's.
        named = [t for t in tokenizer.special_tokens_map.values() if isinstance(t, str)]
        placeholders = self._media_tokens.values()
        self._typed = TypedTokens(self._encoder, [*named, *placeholders], marks=self._media_tokens.keys())
        self._check_tokens()

    def _check_tokens(self) -> None:
        """Check that special tokens are tokens, and that the tokenizer appends nothing to texts."""
        tokens = self.tokens(self._probe(), {self._main_mark: 1})
        eos_id = self._encoder.token_to_id(self.eos_token)
        if eos_id not in tokens.ids[tokens.trained]:
            raise DataError(f"the tokenizer does not turn {self.eos_token} after an answer into its EOS id {eos_id}")
        if self._adds_special_tokens(self.render(self._probe())):
            added = self._encoder.encode("a", add_special_tokens=True)
            if added.special_tokens_mask[-1]:
                raise DataError(
                    f"the tokenizer ends every text, so every prompt too, with {added.tokens[-1]}; "
                    "remove it from post_processor in tokenizer.json, or start the chat template with bos_token"
                )

    def text_tokens(self, turns: Sequence[Turn], *, num_images: int, num_videos: int = 0) -> TextTokens:
        """As `tokens`, of a conversation without audio clips."""
        return self.tokens(turns, {IMAGE_MARK: num_images, VIDEO_MARK: num_videos})

    def tokens(self, turns: Sequence[Turn], media: Mapping[str, int], tools: Tools = ()) -> TextTokens:
        """Tokenize a conversation as Hugging Face's processor does, but with one placeholder per image, video and
        audio.

        The trained answers are marked with their EOS. Raises DataError if marks do not match `media`, which are numbers
        by mark, or the template cannot render the turns and tools.
        """
        turns, literal = self._literal(turns, media)
        check_marks(turns, media)
        turns, tools, typed, hidden = self._hidden(turns, tools)
        text, spans = rewritten(*self.segments(turns, tools), self._around_media)
        encoding, ids, is_media = self._encoded(text, media, hidden=hidden)
        trained = np.zeros(len(ids), dtype=np.bool_)
        for span in spans:
            trained[tokens_in_span(encoding, span, len(text))] = True
        num_filled = sum(text.startswith(self.own_text, _first_visible(text, start)) for start, _ in spans)
        return TextTokens(
            ids, trained & ~is_media, tuple(sorted((*typed, *literal))), num_filled if self.own_text else 0
        )

    def prompt_tokens(self, turns: Sequence[Turn], media: Mapping[str, int], tools: Tools = ()) -> TextTokens:
        """Tokenize `prompt_text` as `tokens` does a conversation; nothing is trained. DataError like `tokens`."""
        turns, literal = self._literal(turns, media)
        check_marks(turns, media)
        turns, tools, typed, hidden = self._hidden(turns, tools)
        text, _ = rewritten(self.prompt_text(turns, tools), [], self._around_media)
        _, ids, _ = self._encoded(text, media, hidden=hidden)
        return TextTokens(ids, np.zeros(len(ids), dtype=np.bool_), tuple(sorted((*typed, *literal))))

    def _literal(self, turns: Sequence[Turn], media: Mapping[str, int]) -> tuple[Sequence[Turn], list[str]]:
        """Return turns in which marks of media that the class does not take are escaped, and these marks."""
        marks = [mark for mark in self.literal_marks if not media.get(mark) and count_marks(turns, mark)]
        return [replace(turn, text=as_text(turn.text, marks)) for turn in turns] if marks else turns, marks

    def _hidden(self, turns: Sequence[Turn], tools: Tools) -> tuple[Sequence[Turn], Tools, tuple[str, ...], bool]:
        """Return turns and tools with special tokens and escaped marks hidden if they must be.

        Also returns the special tokens in the text, and whether anything is hidden.
        """
        typed = self.typed_in(turns, tools)
        hides_typed = bool(typed) and self.special_tokens_in_text == "text"
        if not hides_typed and not any(map(self._typed.has_literal, texts_of(turns, tools))):
            return turns, tools, typed, False

        def hide(text: str) -> str:
            return self._typed.hide(text, typed=hides_typed)

        return [changed(turn, hide) for turn in turns], changed_strings(list(tools), hide), typed, True

    def _encoded(
        self, text: str, media: Mapping[str, int], *, hidden: bool
    ) -> tuple[Encoding, NDArray[np.int64], NDArray[np.bool_]]:
        """Return a rendered text's encoding, its ids, and which of them are placeholders.

        Args:
            media: numbers of images, videos and audio clips by mark.
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
            left, expected = int((ids == token_id).sum()), media.get(mark, 0)
            if left != expected:
                token = self._media_tokens[mark]
                raise DataError(f"the chat template leaves {left} of {expected} {token}: {text!r:.2000}")
        return encoding, ids, np.isin(ids, [*self.media_ids.values(), *self._mark_ids])

    def typed_in(self, turns: Sequence[Turn], tools: Tools = ()) -> tuple[str, ...]:
        """Return the special tokens in the texts of turns and tools, and marks that are text; no others."""
        typed = {mark for mark in self.literal_marks if count_marks(turns, mark)}
        for text in texts_of(turns, tools):
            typed |= self._typed.found_in(text)
        return tuple(sorted(typed))

    def special_in(self, text: str) -> tuple[str, ...]:
        """Return the special tokens in a text, placeholders of images and videos too."""
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


def _first_visible(text: str, start: int) -> int:
    """Return the position of the first character from `start` that is not white space."""
    return next((index for index in range(start, len(text)) if not text[index].isspace()), len(text))


def rewritten(text: str, spans: Sequence[Span], around: AroundMedia) -> tuple[str, list[Span]]:
    """Return the text after all rules, and where the spans are in it."""
    bounds = [bound for span in spans for bound in span]
    for pattern, replacement in around.rules:
        ends = [(match.end(), len(replacement) - len(match[0])) for match in re.finditer(pattern, text)]
        bounds = [bound + sum(longer for end, longer in ends if end <= bound) for bound in bounds]
        text = re.sub(pattern, replacement.replace("\\", r"\\"), text)
    return text, list(zip(bounds[::2], bounds[1::2], strict=True))


def texts_of(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> Iterator[str]:
    """Yield every text. Marks outside of messages are literal text, so they are escaped here."""
    for turn in turns:
        yield turn.text
        yield from (escape(text) for text in _strings([turn.reasoning, turn.fields]))
    yield from (escape(text) for text in _strings(tools))


def changed(turn: Turn, change: Callable[[str], str]) -> Turn:
    """Return the turn with every text changed. `change`: gets texts as `texts_of` yields them."""
    reasoning, fields = changed_strings((turn.reasoning, turn.fields), change)
    return replace(turn, text=change(turn.text), reasoning=reasoning, fields=fields)


def changed_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return plain containers with every string in them, escaped, changed. Keys of objects stay."""
    if isinstance(value, str):
        return unescape(change(escape(value)))
    if isinstance(value, Mapping):
        return {key: changed_strings(item, change) for key, item in value.items()}
    return [changed_strings(item, change) for item in value] if isinstance(value, (list, tuple)) else value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if value:
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
