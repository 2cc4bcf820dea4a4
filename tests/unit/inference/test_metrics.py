"""Metrics of answers: values worked out by hand, and the same for every order of the samples."""

from __future__ import annotations

import math
import random
import sys

import pytest
from rouge_score.rouge_scorer import RougeScorer

from llava_mcore.errors import ConfigError
from llava_mcore.inference.evaluation.languages import tokenizer_for
from llava_mcore.inference.evaluation.metrics import Answered, anls, bleu, cider, exact_match, rouge, score

ENGLISH = (
    Answered("a cat sits on the mat today", ("a cat sits on the mat", "the cat sat there")),
    Answered("seven", ("7", "seven")),
    Answered("two dogs play in the snow", ("two dogs run in the snow",)),
    Answered(" dog\n", ("Dog",)),
    Answered("", ("a red car",)),
)
JAPANESE = (
    Answered("猫がマットの上に座っている。", ("猫がマットの上に座っている。",)),
    Answered("これは犬です。", ("これは猫です。",)),
)


def test_exact_match_ignores_white_space_at_the_ends_only() -> None:
    assert [exact_match(sample) for sample in ENGLISH] == [0, 1, 0, 0, 0]
    assert exact_match(Answered("a  b", ("a b",))) == 0


def test_anls_is_one_minus_the_normalized_distance() -> None:
    assert anls(Answered("Seven ", ("seven",))) == 1
    assert anls(Answered("sevan", ("eight", "seven"))) == pytest.approx(1 - 1 / 5)
    assert anls(Answered("abxx", ("abcd",))) == 0, "half of it differs"
    assert anls(Answered("", ("x",))) == 0


def test_rouge_of_english_is_the_librarys_default() -> None:
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"])
    for sample, found in zip(ENGLISH, rouge(ENGLISH, "13a"), strict=True):
        wanted = scorer.score_multi(list(sample.references), sample.answer)
        assert found == {name: value.fmeasure for name, value in wanted.items()}


@pytest.mark.parametrize(
    ("reference", "close", "other"),
    [
        ("красный дом над рекой", "синий дом над рекой", "кошка спит"),
        ("लाल घर नदी के पास है", "नीला घर नदी के पास है", "बिल्ली सोती"),
        ("빨간 집이 강가에 있다", "파란 집이 강가에 있다", "고양이"),
        ("بيت أحمر قرب النهر", "بيت أزرق قرب النهر", "قطة نائمة"),
        ("บ้านสีแดงริมแม่น้ำ", "บ้านสีฟ้าริมแม่น้ำ", "xyz"),
    ],
)
def test_words_of_every_script_count(reference: str, close: str, other: str) -> None:
    answers = tuple(Answered(answer, (reference,)) for answer in (reference, close, other))
    same, near, far = (values["rouge1"] for values in rouge(answers, "13a"))
    assert same == 1 and 0.5 < near < 1 and far == 0
    ciders = cider((*answers, Answered("a", ("a b c d e",))), "13a")
    assert ciders is not None and ciders[0] == pytest.approx(10) and 0 < ciders[1] < 10 and ciders[2] == 0


def test_japanese_is_compared_by_words() -> None:
    """これ は 犬 です against これ は 猫 です: three of four words, one of three pairs; the full stop is not a word."""
    second = rouge(JAPANESE, "ja-mecab")[1]
    assert second == {"rouge1": 3 / 4, "rouge2": pytest.approx(1 / 3), "rougeL": 3 / 4}
    assert bleu(JAPANESE[:1], "ja-mecab") == pytest.approx(100)
    assert 0 < bleu(JAPANESE, "ja-mecab") < 100
    ciders = cider(JAPANESE, "ja-mecab")
    assert ciders is not None
    assert ciders[0] == pytest.approx(10)
    assert 0 < ciders[1] < 5


@pytest.mark.parametrize(
    ("references", "tokenizer"),
    [(("a cat", "un café"), "13a"), (("a cat", "これは猫"), "ja-mecab"), (("a cat", "一只猫"), "zh")],
)
def test_tokenizer_follows_the_references(references: tuple[str, ...], tokenizer: str) -> None:
    assert tokenizer_for(references) == tokenizer_for(reversed(references)) == tokenizer


def test_bleu_takes_any_number_of_references() -> None:
    """7 of 7 one-grams would be right except for `today`: 6/7, 5/6, 4/5, 3/4 of a sentence that is not too short."""
    first = ENGLISH[:1]
    assert bleu(first, "13a") == pytest.approx(100 * math.prod([6 / 7, 5 / 6, 4 / 5, 3 / 4]) ** (1 / 4))
    assert bleu((*first, Answered("x", ("y",))), "13a") < bleu(first, "13a")
    also = [Answered(x.answer, (*x.references, x.answer)) for x in first]
    assert bleu(also, "13a") == pytest.approx(100), "the second reference counts too"


def test_cider_of_equal_texts_is_ten_and_needs_several_samples() -> None:
    equal = [Answered(text, (text,)) for text in ("a cat on a mat", "two dogs in snow", "the red car stops")]
    assert cider(equal, "13a") == pytest.approx([10, 10, 10])
    assert cider(equal[:1], "13a") is None
    assert cider([Answered("a", ("!",)), Answered("b", ("?",))], "13a") is None
    assert "cider" not in score(equal[:1]).metrics


@pytest.mark.parametrize("samples", [ENGLISH, JAPANESE, ENGLISH + JAPANESE])
def test_order_of_samples_changes_nothing(samples: tuple[Answered, ...]) -> None:
    many = samples * 7
    wanted = score(many)
    for seed in range(5):
        order = random.Random(seed).sample(range(len(many)), len(many))
        found = score([many[index] for index in order])
        assert found.metrics == wanted.metrics
        assert found.samples == tuple(wanted.samples[index] for index in order)


def test_means_are_those_of_the_samples() -> None:
    found = score(ENGLISH)
    assert found.metrics["exact_match"] == 1 / 5
    for name in ("anls", "rougeL", "cider"):
        assert found.metrics[name] == pytest.approx(sum(values[name] for values in found.samples) / 5)


@pytest.mark.parametrize("package", ["rapidfuzz.distance", "rouge_score.rouge_scorer", "sacrebleu.metrics.bleu"])
def test_missing_package_is_one_message(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r"llava-mcore\[eval\]"):
        score(ENGLISH)


def test_nothing_to_score_is_an_error() -> None:
    with pytest.raises(ValueError, match="no answers"):
        score([])
    with pytest.raises(ValueError, match="reference"):
        Answered("a", ())


def test_bleu_of_a_script_without_spaces_compares_letters() -> None:
    thai = "แมวดำตัวใหญ่นอนอยู่"
    assert bleu([Answered(thai, (thai,))], "13a") == pytest.approx(100)
    assert bleu([Answered(thai, ("บ้านสีแดงหลังเล็ก",))], "13a") < 10
