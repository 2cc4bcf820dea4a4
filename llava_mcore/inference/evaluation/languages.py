"""How the metrics that compare words find the words of a text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal

from llava_mcore.errors import ConfigError

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU
import importlib.util

TokenizerName = Literal["13a", "ja-mecab", "zh"]
"""sacrebleu's names: 13a for languages with spaces between words, MeCab with the IPA dictionary for Japanese, one token
per character for Chinese."""
NO_LIBRARIES = 'metrics of answers need more packages: pip install "llava-mcore[eval]"'

_KANA = re.compile(r"[\u3041-\u30ff\uff66-\uff9f]")
_NO_SPACES = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff][\u0e31\u0e34-\u0e3a\u0e47-\u0e4e]*")
"""A letter of Thai, Lao, Burmese or Khmer with Thai's marks above and below: these have no spaces between words."""
_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]")


def tokenizer_for(references: Iterable[str]) -> TokenizerName:
    """Return the tokenizer for a set of references; their order does not matter.

    One reference with kana makes the set Japanese: MeCab also splits English at its spaces, but 13a makes one word of a
    Japanese sentence.
    """
    text = "\n".join(references)
    if _KANA.search(text):
        return "ja-mecab"
    return "zh" if _HAN.search(text) else "13a"


def words_of(tokenizer: TokenizerName) -> Callable[[str], list[str]]:
    """Return the function that lists a text's words, in lower case, for ROUGE and CIDEr.

    For 13a, words are runs of letters, their marks, and digits of any script: in ASCII text, those of rouge-score.

    Raises:
        ConfigError: a package of the extra `eval` is not installed.
    """
    if tokenizer == "13a":
        return _unicode_words
    split = bleu_metric(tokenizer).tokenizer
    return lambda text: [word for word in split(text.lower()).split() if any(map(str.isalnum, word))]


def _unicode_words(text: str) -> list[str]:
    """Return the words of a text in lower case. rouge-score's own would keep a-z and 0-9 only."""
    characters = unicodedata.normalize("NFC", text.lower())
    spaced = "".join(char if unicodedata.category(char)[0] in "LMN" else " " for char in characters)
    return with_spaces(spaced).split()


def with_spaces(text: str) -> str:
    """Return a text with the letters of scripts without spaces between words set apart; sacrebleu's 13a does not."""
    return _NO_SPACES.sub(r" \g<0> ", text)


def bleu_metric(tokenizer: TokenizerName) -> BLEU:
    """Return sacrebleu's BLEU.

    Raises:
        ConfigError: sacrebleu, or its packages for Japanese, are not installed.
    """
    try:
        from sacrebleu.metrics.bleu import BLEU

        return BLEU(tokenize=tokenizer)
    except (ImportError, RuntimeError) as error:  # sacrebleu raises RuntimeError for a missing MeCab
        raise ConfigError(NO_LIBRARIES) from error


NAMES = ("pycocoevalcap", "rapidfuzz", "rouge_score", "sacrebleu")


def require_libraries() -> None:
    """Raise ConfigError if one is not installed."""
    missing = [name for name in NAMES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{NO_LIBRARIES} (missing: {', '.join(missing)})")
