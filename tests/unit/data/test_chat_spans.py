"""The tokens in a span of a text, against the definition over the offsets of all tokens."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Encoding, Tokenizer

from llava_mcore.data.encode.tokens import tokens_in_span
from tests.helpers.chat_cases import TINY

PIECES = ["is", " the", "  ", "\n", " ", "漢", "é", "🙂", "</s>", "<image>", "a", "tiny test", "\n\n "]


@cache
def encoder(kind: str) -> Tokenizer:
    return TINY[kind]("vicuna").backend_tokenizer


def inside(encoding: Encoding, start: int, end: int) -> list[int]:
    """A token is inside if it shares a character, or lost its white space to trimming and ends inside."""
    offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    begins, ends = offsets[:, 0], offsets[:, 1]
    trimmed = (begins == ends) & (begins > start) & (begins <= end)
    return np.flatnonzero((begins < end) & (ends > start) & (begins < ends) | trimmed).tolist()


@pytest.mark.parametrize("kind", TINY)
def test_tokens_of_a_span_are_those_that_share_its_characters(kind: str) -> None:
    @settings(max_examples=300)
    @given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=12).map("".join), st.data())
    def check(text: str, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, len(text) - 1))
        end = data.draw(st.integers(start + 1, len(text)))
        encoding = encoder(kind).encode(text, add_special_tokens=data.draw(st.booleans()))
        found = tokens_in_span(encoding, (start, end), len(text))
        assert list(range(len(encoding)))[found] == inside(encoding, start, end)

    check()
