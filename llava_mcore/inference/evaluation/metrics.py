"""Metrics of answers: exact match, ANLS, ROUGE, BLEU and CIDEr.

Every result is the same for every order of the samples. For equal results at every world size, gather the answers of
all ranks, then call `score`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llava_mcore.errors import ConfigError
from llava_mcore.inference.evaluation.languages import (
    NO_LIBRARIES,
    TokenizerName,
    bleu_metric,
    tokenizer_for,
    with_spaces,
    words_of,
)

ANLS_THRESHOLD = 0.5
ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")


@dataclass(frozen=True, slots=True)
class Answered:
    """A generated answer and the references that count as right, at least one."""

    answer: str
    references: tuple[str, ...]

    def __post_init__(self) -> None:
        """Raise ValueError if there is no reference."""
        if not self.references:
            raise ValueError("an answer needs at least one reference")


@dataclass(frozen=True, slots=True)
class Scores:
    """Metrics of a set of answers."""

    num_samples: int
    tokenizer: TokenizerName
    """The tokenizer that split words for ROUGE, BLEU and CIDEr."""
    metrics: dict[str, float]
    """exact_match, anls, rouge1, rouge2, rougeL: means, 0 to 1. bleu: 0 to 100, of all answers together. cider: mean,
    0 to 10; absent where it is not defined (see `cider`)."""
    samples: tuple[dict[str, float], ...]
    """Metrics of each sample, in the order given: all of the above but bleu."""


def score(answered: Sequence[Answered], tokenizer: TokenizerName | None = None) -> Scores:
    """Return all metrics of at least one answer.

    Args:
        tokenizer: by default, chosen from the references.

    Raises:
        ConfigError: a package of the extra `eval` is not installed.
        ValueError: there is no answer.
    """
    if not answered:
        raise ValueError("no answers to score")
    tokenizer = tokenizer or tokenizer_for(text for sample in answered for text in sample.references)
    rouges = rouge(answered, tokenizer)
    ciders = cider(answered, tokenizer)
    samples = []
    for index, sample in enumerate(answered):
        values = {"exact_match": exact_match(sample), "anls": anls(sample), **rouges[index]}
        samples.append(values if ciders is None else {**values, "cider": ciders[index]})
    metrics = {name: math.fsum(values[name] for values in samples) / len(samples) for name in samples[0]}
    return Scores(len(samples), tokenizer, {**metrics, "bleu": bleu(answered, tokenizer)}, tuple(samples))


def exact_match(sample: Answered) -> float:
    """Return 1 if the answer equals a reference, apart from white space at both ends, else 0."""
    return float(sample.answer.strip() in {text.strip() for text in sample.references})


def anls(sample: Answered) -> float:
    """Return the average normalized Levenshtein similarity (Biten et al., 2019, arXiv:1905.13648, section 4) to the
    closest reference, ignoring case and the amount of white space; 0 to 1, and 0 if the similarity is below one half.

    Raises:
        ConfigError: rapidfuzz is not installed.
    """
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError as error:
        raise ConfigError(NO_LIBRARIES) from error
    answer = _plain(sample.answer)
    distance = min(Levenshtein.normalized_distance(answer, _plain(text)) for text in sample.references)
    return 1 - distance if distance < ANLS_THRESHOLD else 0.0


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def rouge(answered: Sequence[Answered], tokenizer: TokenizerName) -> list[dict[str, float]]:
    """Return F1 of ROUGE-1, -2 and -L of each sample, with the best of its references; 0 to 1.

    Raises:
        ConfigError: a package of the extra `eval` is not installed.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ConfigError(NO_LIBRARIES) from error
    scorer = RougeScorer(list(ROUGE_TYPES), tokenizer=_Words(tokenizer))
    scores_of_samples = [scorer.score_multi(list(sample.references), sample.answer) for sample in answered]
    return [{name: float(scores[name].fmeasure) for name in ROUGE_TYPES} for scores in scores_of_samples]


class _Words:
    """A tokenizer, as rouge-score takes it."""

    def __init__(self, tokenizer: TokenizerName) -> None:
        self.tokenize = words_of(tokenizer)


def bleu(answered: Sequence[Answered], tokenizer: TokenizerName) -> float:
    """Return BLEU-4 of all answers together, 0 to 100; 0 if no answer has four tokens.

    With 13a, a letter of Thai, Lao, Burmese or Khmer is a token: a sentence in them would be a single one.

    Raises:
        ConfigError: a package of the extra `eval` is not installed.
    """
    metric = bleu_metric(tokenizer)
    num_references = max(len(sample.references) for sample in answered)
    split = with_spaces if tokenizer == "13a" else str
    # One list per position in the samples' references. Repeating a sample's last one does not change its counts.
    streams = [[split(sample.references[min(index, len(sample.references) - 1)]) for sample in answered]
               for index in range(num_references)]  # fmt: skip
    score = metric.corpus_score([split(sample.answer) for sample in answered], streams)
    return float(score.score)


def cider(answered: Sequence[Answered], tokenizer: TokenizerName) -> list[float] | None:
    """Return CIDEr-D (Vedantam et al., 2015, arXiv:1411.5726) of each sample, 0 to 10.

    Words are weighted by their rarity among the references of these samples, so only values of the same samples can be
    compared. An answer of one word gets 2.5 at most: four n-gram lengths are averaged. Words are those of `words_of`;
    COCO's tokenizer needs Java.

    Returns:
        None if it is not defined: with a single sample, or no words in the references.

    Raises:
        ConfigError: a package of the extra `eval` is not installed.
    """
    words = words_of(tokenizer)
    try:
        from pycocoevalcap.cider.cider_scorer import CiderScorer
    except ImportError as error:
        raise ConfigError(NO_LIBRARIES) from error
    references = [[" ".join(words(text)) for text in sample.references] for sample in answered]
    if len(answered) < 2 or not any(text for texts in references for text in texts):
        return None
    scorer = CiderScorer()
    for sample, texts in zip(answered, references, strict=True):
        scorer += (" ".join(words(sample.answer)), texts)
    _, values = scorer.compute_score()
    return [float(value) for value in values]
