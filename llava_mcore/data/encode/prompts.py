"""Prompts for data with answers but no questions, such as captions.

A dataset of a blend names its pool: `subflavors: {prompt_pool: caption}`.
"""

from __future__ import annotations

import difflib
import hashlib
from typing import Literal

from llava_mcore.errors import DataError

POOL_KEY = "prompt_pool"
"""The subflavor that names a dataset's pool."""

POOLS: dict[str, dict[str, tuple[str, ...]]] = {
    "caption": {
        "en": (
            "Describe this image in one sentence.",
            "What does the image show? Answer briefly.",
            "Give a short caption for this image.",
            "In a few words, what can be seen here?",
            "Sum up the image in one line.",
            "Write one plain sentence about what is in the image.",
            "What is this an image of?",
            "State briefly what you see.",
        ),
        "jp": (
            "この画像を一文で説明してください。",
            "画像には何が写っていますか。簡潔に答えてください。",
            "この写真に短い説明文を付けてください。",
            "ここに見えるものを手短に述べてください。",
            "画像の内容を一行でまとめてください。",
            "何が写っているか、ひとことで教えてください。",
            "これは何の画像ですか。",
            "見えるものを簡単な一文で書いてください。",
        ),
    },
    "detailed_caption": {
        "en": (
            "Describe this image in detail.",
            "Look closely and write down everything that matters in the image.",
            "Give a full account of the scene: what is there, where it is, and what it looks like.",
            "What can be seen here? Go through the objects, their places and the background.",
            "Write a thorough description for somebody who cannot see the image.",
            "Explain at length what the image shows.",
            "Cover the whole image, from the foreground to the background, in several sentences.",
            "Tell me all you can about this image.",
        ),
        "jp": (
            "この画像を詳しく説明してください。",
            "画像をよく見て、重要な点をすべて書き出してください。",
            "何がどこにあり、どのように見えるか、場面全体を詳しく述べてください。",
            "写っている物、その位置、背景を順に説明してください。",
            "画像を見られない人に伝わるように、丁寧に描写してください。",
            "この写真の内容を、数文にわたって説明してください。",
            "手前から背景まで、画像全体の様子を詳しく教えてください。",
            "この画像について分かることをできるだけ詳しく書いてください。",
        ),
    },
    "ocr": {
        "en": (
            "Read the text in this image.",
            "What is written here?",
            "Write down all text that can be seen in the image.",
            "Transcribe the image.",
            "Which words and numbers does the image contain?",
            "Copy the text of this image exactly as it stands.",
        ),
        "jp": (
            "この画像の文字を読み取ってください。",
            "ここには何と書かれていますか。",
            "画像の中の文字をすべて書き出してください。",
            "画像の文章を書き起こしてください。",
            "写っている単語や数字を答えてください。",
            "この画像にある文字を、そのまま写してください。",
        ),
    },
}
"""Pool -> language -> prompts. A new prompt changes which one a sample gets."""


def check_pool(pool: str) -> None:
    """Raise DataError unless the pool exists."""
    if pool not in POOLS:
        close = difflib.get_close_matches(pool, POOLS, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise DataError(f"{POOL_KEY} {pool!r}: no such pool of prompts{hint}; there are {', '.join(POOLS)}")


def choose_prompt(pool: str, lang: Literal["jp", "en"], sample_key: str, seed: int) -> str:
    """Return a prompt for a sample without a question.

    It depends only on the arguments, so neither the order of samples nor a resume changes it.

    Raises:
        DataError: the pool does not exist.
    """
    check_pool(pool)
    prompts = POOLS[pool][lang]
    digest = hashlib.blake2b(f"{seed}\0{pool}\0{sample_key}".encode(), digest_size=8).digest()
    return prompts[int.from_bytes(digest, "big") % len(prompts)]
