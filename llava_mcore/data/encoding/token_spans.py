"""Which tokens a stretch of text became."""

from __future__ import annotations

from tokenizers import Encoding

Span = tuple[int, int]
"""Characters [start, end) of a rendered conversation."""


def tokens_in_span(encoding: Encoding, span: Span, length: int) -> slice:
    """Return the tokens that have a part in the characters of a span, of a text of so many characters.

    All byte tokens of one character carry that character's offsets, so none of them is lost. A white-space token
    whose offsets were trimmed to nothing ends at its right edge. The encoding is asked for single characters, since
    handing over the offsets of all tokens takes a fifth of the time of tokenizing.
    """
    start, end = span
    first, behind = (_token_at(encoding, place, length) for place in span)
    while _is_trimmed(encoding, first - 1, behind_char=start):
        first -= 1
    chars = encoding.token_to_chars(behind) if behind < len(encoding) else None
    if chars is not None and chars[0] < end:
        return slice(first, behind + 1)
    while _is_trimmed(encoding, behind - 1, behind_char=end):
        behind -= 1
    return slice(first, behind)


def _token_at(encoding: Encoding, start: int, length: int) -> int:
    """Return the first token of the first character from start on that has one, or the number of all tokens."""
    found = (encoding.char_to_token(place) for place in range(start, length))
    return next((token for token in found if token is not None), len(encoding))


def _is_trimmed(encoding: Encoding, token: int, *, behind_char: int) -> bool:
    """Tell whether a token has no characters left and ends behind the given one."""
    chars = encoding.token_to_chars(token) if token >= 0 else None
    return chars is not None and chars[0] == chars[1] > behind_char
