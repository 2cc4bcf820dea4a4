"""Special tokens that somebody typed are text; the template's own, and everything else, are what they were."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from llava_mcore.cli import prepare as prepare_app
from llava_mcore.cli.check import main as check
from llava_mcore.config.sections.data import Handling
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.data.encode.chat_format import ChatFormat
from llava_mcore.data.samples import IMAGE_MARK, Turn
from llava_mcore.errors import DataError
from llava_mcore.templates.named import NAMES, named_template
from tests.helpers.bad_data_makers import index, messages, picture, write_tar
from tests.helpers.chat_cases import TINY, tiny
from tests.helpers.encoding import encoded
from tests.helpers.tiny_qwen import make_hf_qwen
from tests.unit.data.test_data_loader import open_loader, take

pytest_plugins = ("tests.helpers.llava_fixtures",)

TYPED = "</s>quick <|im_end|> <pad><unk><|eot_id|> <s>"
"""In an answer; the tokenizers have some of them as tokens."""


def chat(tokenizer: PreTrainedTokenizerFast, name: str, handling: Handling = "text") -> ChatFormat:
    template = named_template(name, tokenizer)
    return ChatFormat(tokenizer, template, image_token=IMAGE_MARK, special_tokens_in_text=handling)


def talk(question: str, answer: str) -> list[Turn]:
    return [
        Turn("user", f"{IMAGE_MARK}\n{question}"),
        Turn("assistant", answer),
        Turn("user", "q"),
        Turn("assistant", "z"),
    ]


def special_ids(format_: ChatFormat, tokenizer: PreTrainedTokenizerFast, turns: list[Turn]) -> list[int]:
    known = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return [number for number in encoded(format_, turns, num_images=1).input_ids.tolist() if number in known]


def unigram() -> PreTrainedTokenizerFast:
    """SentencePiece's other kind: pieces with scores, looked for after the text is normalized."""
    letters = sorted(set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ<>/|_ ▁:.?!\n0123456789[]"))
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("is", -2.0), *((letter, -5.0) for letter in letters)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens([AddedToken(t, normalized=True, special=True) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.add_special_tokens([AddedToken(IMAGE_MARK, normalized=False, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("kind", TINY)
@pytest.mark.parametrize("name", NAMES)
def test_typed_ones_are_text(name: str, kind: str) -> None:
    tokenizer = TINY[kind](name)
    format_ = chat(tokenizer, name)
    found = encoded(format_, talk("What is </s> here?", f"a {TYPED} z"), num_images=1)
    plain = talk("What is here?", "a z")
    assert special_ids(format_, tokenizer, talk("What is </s> here?", f"a {TYPED} z")) == special_ids(
        format_, tokenizer, plain
    )
    trained = tokenizer.decode(found.input_ids[found.trained])
    ending = tokenizer.decode(
        encoded(format_, plain, num_images=1).input_ids[encoded(format_, plain, num_images=1).trained]
    )
    assert trained.replace(f"a {TYPED} z", "a z") == ending
    assert "</s>" in found.typed and IMAGE_MARK not in found.typed


@pytest.mark.parametrize("kind", TINY)
def test_ids_are_those_of_the_text_alone(kind: str) -> None:
    """In ChatML every turn stands alone between two tokens; the reference has the tokenizers library split them."""
    tokenizer = tiny("chatml") if kind == "its own tokens" else TINY[kind]("chatml")
    if kind != "its own tokens":
        tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    ids = encoded(
        chat(tokenizer, "chatml"), [Turn("user", "q"), Turn("assistant", TYPED)], num_images=0
    ).input_ids.tolist()
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    start, end = backend.token_to_id("<|im_start|>"), backend.token_to_id("<|im_end|>")
    last = ids[len(ids) - 1 - ids[::-1].index(start) + 1 :]
    backend.encode_special_tokens = True
    # A prefix that the tokenizer gives only the beginning of a whole text is not part of what stands after a token.
    expected = backend.encode(f"assistant\n{TYPED}", add_special_tokens=False).ids
    if kind == "metaspace":
        expected = backend.encode(f"xassistant\n{TYPED}", add_special_tokens=False).ids[2:]
        last = last[-len(expected) - 2 :] if last[: last.index(end)] != expected else last
    assert last[: last.index(end)] == expected


def test_as_tokens_where_data_rely_on_it() -> None:
    """Typed special tokens count as such only if asked, and the fingerprint tells the difference."""
    tokenizer = tiny("chatml")
    turns = talk("q", "a<|im_end|>")
    as_text, as_control = chat(tokenizer, "chatml"), chat(tokenizer, "chatml", "control")
    assert len(special_ids(as_control, tokenizer, turns)) == len(special_ids(as_text, tokenizer, turns)) + 1
    assert as_text.fingerprint != as_control.fingerprint
    plain = talk("q", "a")
    found = [encoded(format_, plain, num_images=1).input_ids.tolist() for format_ in (as_text, as_control)]
    assert found[0] == found[1]


def test_pieces_with_scores_and_normalized_forms() -> None:
    """A typed special token stays text, also if normalization makes it one."""
    tokenizer = unigram()
    format_ = chat(tokenizer, "vicuna")
    plain = special_ids(format_, tokenizer, talk("q", "a z"))
    assert plain.count(2) == 2
    for typed in ("</s>", "<s>", "\uff1c/s\uff1e", "<unk>", "x</s></s>"):  # full width: NFKC makes </s> of it
        assert special_ids(format_, tokenizer, talk(f"q{typed}", f"a {typed} z")) == plain, typed
    assert special_ids(chat(tokenizer, "vicuna", "control"), tokenizer, talk("q", "a \uff1c/s\uff1e z")) != plain


def test_placeholder_of_another_name_is_text_when_typed() -> None:
    tokenizer = tiny("vicuna")
    tokenizer.add_tokens(["<picture>"], special_tokens=True)
    format_ = ChatFormat(tokenizer, named_template("vicuna", tokenizer), image_token=IMAGE_MARK)
    assert len(encoded(format_, talk("a <picture>", "b <picture>"), num_images=1).starts) == 1
    with pytest.raises(DataError, match="2 <image> in the conversation, but 1 images"):
        encoded(format_, talk("a", "the tag <image> is"), num_images=1)


@pytest.mark.parametrize("name", ["vicuna", "chatml"])
@pytest.mark.parametrize("special", [False, True])
def test_marks_of_media_that_the_class_does_not_take_are_text(name: str, special: bool) -> None:
    """As in questions about HTML. The tokenizer may have a token of that name."""
    tokenizer = tiny(name)
    if special:
        tokenizer.add_tokens(["<video>"], special_tokens=True)
    format_ = chat(tokenizer, name)
    turns = talk("What is <video>?", "A film,\n<video>\n as <audio> is an audio clip.")
    tokens = encoded(format_, turns, num_images=1)
    assert tokens.typed == ("<audio>", "<video>") and len(tokens.starts) == 1
    text = tokenizer.decode(tokens.input_ids)
    assert "What is <video>?" in text and "A film,\n<video>\n as <audio> is an audio clip." in text
    assert not special or tokenizer.convert_tokens_to_ids("<video>") not in tokens.input_ids
    asked = format_.prompt_tokens(turns[:1], {IMAGE_MARK: 1})
    assert "What is <video>?" in tokenizer.decode(asked.ids)
    with pytest.raises(DataError, match="0 <video> in the conversation, but 1 videos"):
        format_.tokens(turns[2:], {"<video>": 1})


def test_private_characters_are_refused_only_beside_them() -> None:
    tokenizer = tiny("vicuna")
    format_ = chat(tokenizer, "vicuna")
    assert not encoded(format_, talk("\U000f0001", "a"), num_images=1).typed
    with pytest.raises(DataError, match="private characters"):
        encoded(format_, talk("\U000f0001", "a</s>"), num_images=1)


# -- commands --------------------------------------------------------------------------------------------------------


def talks(folder: Path) -> Path:
    """Eight samples, of which two type </s>."""
    answers = ["yes", "y</s>z", "no", "</s></s>", "a", "b", "c", "d"]
    samples = {
        f"{n:06d}": {"json": messages(("user", "<image>\nq"), ("assistant", answer)), "0.jpg": picture()}
        for n, answer in enumerate(answers)
    }
    write_tar(folder / "000000.tar", samples)
    return index(folder)


def test_training_warns_once(hf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, assets = talks(tmp_path), load_assets(hf)
    with caplog.at_level(logging.WARNING):
        batches = take(open_loader(path, assets), 12)
    said = [record.getMessage() for record in caplog.records if "special token" in record.getMessage()]
    assert len(said) == 1 and "</s>" in said[0] and "read as plain text" in said[0]
    trained = sum(int((b.labels[b.loss_mask > 0] == assets.eos_token_id).sum()) for b in batches)
    assert trained == sum(len(batch.sample_keys) for batch in batches)


def test_check_and_prepare_count(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = talks(tmp_path / "data")
    flags = ["--tokenizer-load-dir", str(hf)]
    assert check(["--data-path", str(path), *flags, "--json", str(tmp_path / "report.json")]) == 0
    groups = json.loads((tmp_path / "report.json").read_text())["groups"]
    assert [(g["level"], g["count"]) for g in groups] == [("remark", 2)] and "</s>" in groups[0]["reason"]
    for handling, said in (("text", "read as text"), ("control", "read as the token")):
        out = tmp_path / handling
        more = ["--out", str(out), "--num-workers", "0", "--special-tokens-in-text", handling]
        assert prepare_app.main([str(path / "000000.tar"), *flags, *more]) == 0
        assert f"2 samples with </s> in the text; it is {said}" in capsys.readouterr().out
        assert json.loads((out / "manifest.json").read_text())["totals"]["typed"] == {"</s>": 2}
    tokens = [json.loads((tmp_path / name / ".nv-meta" / "tokens.json").read_text()) for name in ("text", "control")]
    assert tokens[0] != tokens[1]


def test_a_typed_placeholder_names_the_mark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """`<|image_pad|>` is Qwen-VL's placeholder, and text in a row; prepare, check and training say what to write."""
    make_hf_qwen(tmp_path / "hf", "qwen2_5_vl")
    row = messages(("user", "What is <|image_pad|>?"), ("assistant", "A token."))
    path = index(write_tar(tmp_path / "own" / "0.tar", {f"{n}": {"json": row} for n in range(4)}).parent)
    flags, advice = ["--tokenizer-load-dir", str(tmp_path / "hf")], "where an image belongs, write <image>"
    assert prepare_app.main([str(path / "0.tar"), *flags, "--out", str(tmp_path / "out"), "--num-workers", "0"]) == 0
    said = f"<|image_pad|> in the text; it is read as text (--special-tokens-in-text); {advice}"
    assert said in capsys.readouterr().out
    assert check(["--data-path", str(path), *flags, "--json", str(tmp_path / "report.json")]) == 0
    reasons = [group["reason"] for group in json.loads((tmp_path / "report.json").read_text())["groups"]]
    assert any("<|image_pad|>" in reason and reason.endswith(advice) for reason in reasons)
    with caplog.at_level(logging.WARNING):
        take(open_loader(path, load_assets(tmp_path / "hf"), num_streams=1, micro_batch_size=4), 1)
    assert any("<|image_pad|>" in x.getMessage() and x.getMessage().endswith(advice) for x in caplog.records)


def test_literal_marks_are_counted(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By prepare, which escapes them, for any model; check and training take such text as it is too."""
    rows = [messages(("user", "What is <video>?"), ("assistant", f"A <video>, {n}.")) for n in range(4)]
    rows.append(messages(("user", "<image> What?"), ("assistant", "Nothing.")))
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    flags, out = ["--tokenizer-load-dir", str(hf)], tmp_path / "out"
    command = [str(tmp_path / "rows.jsonl"), "--out", str(out), "--num-workers", "0", "--max-skip-rate", "0.5"]
    assert prepare_app.main([*command, *flags]) == 0
    said = "4 samples with <video> in the text; it is read as text: the model takes no such media"
    assert said in capsys.readouterr().out
    assert "1 <image> in the text, but 0 images" in (out / "skipped.jsonl").read_text()
    batches = take(open_loader(out, load_assets(hf), num_streams=1, micro_batch_size=4), 1)
    assert not batches[0].skipped and len(batches[0].sample_keys) == 4
    write_tar(tmp_path / "own" / "0.tar", {f"{n}": {"json": row} for n, row in enumerate(rows[:4])})
    assert check(["--data-path", str(index(tmp_path / "own")), *flags, "--json", str(tmp_path / "report.json")]) == 0
    groups = json.loads((tmp_path / "report.json").read_text())["groups"]
    assert [(g["level"], g["count"]) for g in groups] == [("remark", 4)] and "<video>" in groups[0]["reason"]
    batches = take(open_loader(tmp_path / "own", load_assets(hf), num_streams=1, micro_batch_size=4), 1)
    assert not batches[0].skipped and batches[0].typed_tokens.keys() == {"<video>"}


def test_a_resume_with_another_choice_is_refused(hf: Path, tmp_path: Path) -> None:
    path = talks(tmp_path)
    loader = open_loader(path, load_assets(hf))
    next(loader)
    with pytest.raises(DataError, match="special_tokens_in_text: saved with text, now control"):
        open_loader(path, load_assets(hf), saved=[loader.state()], special_tokens_in_text="control")
