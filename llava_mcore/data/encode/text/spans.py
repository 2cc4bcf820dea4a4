"""Maps spans of text to tokens."""

from __future__ import annotations

from tokenizers import Encoding

Span = tuple[int, int]
"""Characters [start, end) of a rendered conversation."""


def tokens_in_span(encoding: Encoding, span: Span, length: int) -> slice:
    """Return the tokens that overlap with the characters of a span. `length`: number of characters of the text.

    All byte tokens of one character carry that character's offsets, so none of them is lost. A white-space token
    whose offsets were trimmed to nothing ends at its right edge. Only single characters are looked up, because
    fetching the offsets of all tokens takes a fifth of the time of tokenizing.
    """
    start, end = span
    first, after = (_token_at(encoding, char, length) for char in span)
    while _is_trimmed(encoding, first - 1, after_char=start):
        first -= 1
    chars = encoding.token_to_chars(after) if after < len(encoding) else None
    if chars is not None and chars[0] < end:
        return slice(first, after + 1)
    while _is_trimmed(encoding, after - 1, after_char=end):
        after -= 1
    return slice(first, after)


def _token_at(encoding: Encoding, start: int, length: int) -> int:
    """Return the first token of the first character from start on that has one, or the number of all tokens."""
    tokens = (encoding.char_to_token(char) for char in range(start, length))
    return next((token for token in tokens if token is not None), len(encoding))


def _is_trimmed(encoding: Encoding, token: int, *, after_char: int) -> bool:
    """Return whether a token has no characters left and ends after the given one."""
    chars = encoding.token_to_chars(token) if token >= 0 else None
    return chars is not None and chars[0] == chars[1] > after_char
