"""How the metrics that compare words find the words of a text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal

from llava_mcore.errors import ConfigError

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU

TokenizerName = Literal["13a", "ja-mecab", "zh"]
"""sacrebleu's names: 13a for languages with spaces between words, MeCab with the IPA dictionary for Japanese, one token
per character for Chinese."""
NO_LIBRARIES = 'metrics of answers need more packages: pip install "llava-mcore[eval]"'

_KANA = re.compile(r"[\u3041-\u30ff\uff66-\uff9f]")
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

    For 13a it is ROUGE's own, which keeps a-z and 0-9 only.

    Raises:
        ConfigError: a package of the extra `eval` is not installed.
    """
    if tokenizer == "13a":
        try:
            from rouge_score.tokenizers import DefaultTokenizer
        except ImportError as error:
            raise ConfigError(NO_LIBRARIES) from error
        tokenize: Callable[[str], list[str]] = DefaultTokenizer(use_stemmer=False).tokenize
        return tokenize
    split = bleu_metric(tokenizer).tokenizer
    return lambda text: [word for word in split(text.lower()).split() if any(map(str.isalnum, word))]


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
