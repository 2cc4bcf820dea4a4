"""Tokens that were prepared: training takes over the very ids and mask that it would make, or makes them."""

from __future__ import annotations

import copy
import json
import logging
import tarfile
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llava_mcore.cli.check import main as check
from llava_mcore.config.sections.data import PixelRange
from llava_mcore.data.encode.assets import Assets, load_assets
from llava_mcore.data.encode.chat_format import ChatFormat
from llava_mcore.data.encode.encode import stored_tokens, tokenize
from llava_mcore.data.encode.tokens import (
    TOKENS_KEY,
    TextTokens,
    digest_of,
    expand,
    from_json,
    is_by,
    to_json,
    warn_of_other_pixels,
)
from llava_mcore.data.samples import Conversation, Turn
from llava_mcore.errors import DataError
from llava_mcore.media.media import AroundMedia
from llava_mcore.prepare.shard_plan import Counting, Options
from llava_mcore.templates import fixed_date
from tests.helpers.bad_data_makers import index, write_tar
from tests.helpers.encoding import tokens_of_a_picture
from tests.helpers.prepare_cases import chat_cases, make, write_sharegpt
from tests.helpers.tiny_qwen import make_hf_qwen
from tests.unit.data.test_data_loader import assert_equal, open_loader, take

pytest_plugins = ("tests.helpers.llava_fixtures",)

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<"), min_size=1, max_size=30).filter(str.strip)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, hf: Path) -> Path:
    """The same conversations: prepared without tokens, with those of training, and in packs with them."""
    folder = tmp_path_factory.mktemp("data")
    source = write_sharegpt(folder / "src", [c for c in chat_cases() if c.turns[0][0] != "system"] * 4)
    make(source, folder / "bare", Options(8))
    make(source, folder / "stored", Options(8, counting=Counting(hf)))
    make(source, folder / "packs", Options(8, counting=Counting(hf), pack_to=256))
    return folder


def test_whatever_the_tokens_depend_on_changes_the_digest() -> None:
    """Else the stored tokens and mask of another conversation would be trained on."""
    question, answer = Turn("user", "a"), Turn("assistant", "b")
    others = [{"role": "tool"}, {"text": "c"}, {"trained": False}, {"reasoning": "r"}, {"fields": {"name": "n"}}]
    changed = [[question, replace(answer, **one)] for one in others]
    digests = {digest_of([question, answer]), digest_of([question, answer], [{"name": "f"}]), *map(digest_of, changed)}
    assert len(digests) == 2 + len(others)


def test_whatever_the_tokens_depend_on_changes_the_fingerprint(assets: Assets, monkeypatch: pytest.MonkeyPatch) -> None:
    dated = "{{ strftime_now('%Y') }}" + assets.chat.template
    others: dict[str, Any] = {
        **dict.fromkeys(("image_token", "video_token", "audio_token", "eos_token"), "other"),
        **{
            "special_tokens_in_text": "control",
            "template": dated,
            "_variables": {},
            "_around_media": AroundMedia((("a", "b"),)),
        },
    }

    def fingerprint(**changes: Any) -> str:
        changed = copy.copy(assets.chat)
        vars(changed).pop("fingerprint", None)
        vars(changed).update(changes)
        return changed.fingerprint

    found = {fingerprint(), *(fingerprint(**{name: value}) for name, value in others.items())}
    assert len(found) == 1 + len(others) and fingerprint() == assets.chat.fingerprint
    monkeypatch.setattr(fixed_date, "TODAY", datetime(2000, 1, 1))
    assert fingerprint(template=dated) not in found and fingerprint() in found


def test_tokens_of_media_are_never_trained() -> None:
    text = TextTokens(np.array([5, 4, 6]), np.ones(3, np.bool_))
    found = expand(text, [4], [tokens_of_a_picture(4, 2)])
    assert (found.input_ids.tolist(), found.trained.tolist()) == ([5, 4, 4, 6], [True, False, False, True])


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.booleans())))
def test_what_is_stored_comes_back(tokens: list[tuple[int, bool]]) -> None:
    ids, trained = np.array([i for i, _ in tokens], np.int64), np.array([t for _, t in tokens], np.bool_)
    found = from_json(json.loads(json.dumps(to_json(TextTokens(ids, trained), "x", "y"))))
    assert found.ids.dtype == np.int64 and np.array_equal(found.ids, ids)
    assert found.trained.dtype == np.bool_ and np.array_equal(found.trained, trained)


@given(st.lists(st.tuples(TEXT, st.integers(0, 2), TEXT), min_size=1, max_size=3))
def test_taken_over_are_the_tokens_that_would_be_made(assets: Assets, talk: list[tuple[str, int, str]]) -> None:
    turns = tuple(
        turn
        for question, images, answer in talk
        for turn in (Turn("user", "<image>\n" * images + question), Turn("assistant", answer))
    )
    images = (b"",) * sum(number for _, number, _ in talk)
    stored = to_json(assets.chat.text_tokens(turns, num_images=len(images)), assets.chat.fingerprint, digest_of(turns))
    found = stored_tokens(Conversation(turns, images, json.loads(json.dumps(stored))), assets)
    again = assets.chat.text_tokens(turns, num_images=len(images))
    assert found is not None
    for name in ("ids", "trained"):
        one, other = getattr(found, name), getattr(again, name)
        assert one.dtype == other.dtype and np.array_equal(one, other)


@pytest.mark.parametrize(("packing", "workers"), [(False, 0), (True, 0), (True, 1)])
def test_the_loader_gives_the_same_batches(data: Path, assets: Assets, packing: bool, workers: int) -> None:
    options: dict[str, Any] = {"packing": packing, "workers": workers, "seq_length": 256, "num_streams": 2}
    loaders = [open_loader(data / name, assets, **options) for name in ("bare", "stored")]
    bare, stored = (take(loader, 20) for loader in loaders)
    for loader in loaders:
        loader.close()
    assert not any(batch.skipped for batch in bare + stored)
    assert_equal(stored, bare)


@pytest.mark.parametrize("folder", ["stored", "packs"])
def test_nothing_is_tokenised_again(
    data: Path, folder: str, assets: Assets, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ChatFormat, "text_tokens", _refuse)
    with caplog.at_level(logging.INFO):
        batches = take(open_loader(data / folder, assets, packing=True, seq_length=256), 10)
    assert not any(batch.skipped for batch in batches)
    assert caplog.text.count(f"{data / folder}: stored tokens are used") == 1


def _refuse(self: ChatFormat, turns: Any, *, num_images: int, num_videos: int = 0) -> TextTokens:
    raise AssertionError("it tokenizes")


def test_with_another_template_they_are_made_anew(data: Path, hf: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = load_assets(hf, chat_template="vicuna")
    options: dict[str, Any] = {"seq_length": 256, "num_streams": 2}
    with caplog.at_level(logging.INFO):
        stored = take(open_loader(data / "stored", other, **options), 8)
    assert caplog.text.count("prepared with another tokenizer or chat template") == 1
    assert_equal(stored, take(open_loader(data / "bare", other, **options), 8))


def test_the_fingerprint_is_that_of_tokenizer_and_template(hf: Path, assets: Assets) -> None:
    assert load_assets(hf).chat.fingerprint == assets.chat.fingerprint
    assert load_assets(hf, chat_template="vicuna").chat.fingerprint != assets.chat.fingerprint
    tokenizer = load_assets(hf).tokenizer
    tokenizer.add_tokens(["ramp"])
    options: dict[str, Any] = {"image_token": "<image>"}
    assert ChatFormat(tokenizer, assets.chat.template, **options).fingerprint != assets.chat.fingerprint
    same = ChatFormat(assets.tokenizer, assets.chat.template, **options)
    assert same.fingerprint == assets.chat.fingerprint


@pytest.mark.parametrize("stored", [None, 3, {}, {"by": "x", "ids": "!"}])
def test_tokens_of_others_are_ignored(stored: Any, assets: Assets) -> None:
    assert not is_by(stored, assets.chat.fingerprint)
    turns = (Turn("user", "What?"), Turn("assistant", "That."))
    found = tokenize(Conversation(turns, (), stored), assets, "k")
    assert np.array_equal(found.input_ids, assets.chat.text_tokens(turns, num_images=0).ids)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": "AAA"}, "cannot be read"),
        ({"ids": 5}, "cannot be read"),
        ({"trained": [1]}, "cannot be read"),
        ({"trained": "no"}, "cannot be read"),
        ({"ids": ""}, "are not those of 1 images"),
    ],
)
def test_damaged_tokens(change: dict[str, Any], message: str, assets: Assets) -> None:
    """Stored tokens that do not fit the sample are refused with what to do."""
    turns = (Turn("user", "<image>What?"), Turn("assistant", "That."))
    stored = to_json(assets.chat.text_tokens(turns, num_images=1), assets.chat.fingerprint, digest_of(turns))
    with pytest.raises(DataError, match=f"prepared_tokens {message}.*prepare the data again"):
        tokenize(Conversation(turns, (b"",), stored | change), assets, "k")


def edited(source: Path, folder: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    """The first shard of a prepared dataset, the json of its first sample changed and indexed again."""
    samples: dict[str, dict[str, Any]] = {}
    with tarfile.open(source / "000000.tar") as tar:
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None
            key, _, part = member.name.partition(".")
            samples.setdefault(key, {})[part] = file.read()
    first = next(iter(samples.values()))
    content = json.loads(first["json"])
    edit(content)
    write_tar(folder / "000000.tar", {**samples, next(iter(samples)): first | {"json": content}})
    return index(folder)


def test_tokens_of_another_text_are_not_used(assets: Assets) -> None:
    """Neither those of a text that was corrected later, nor those without a digest of their text."""
    turns = (Turn("user", "2 + 5?"), Turn("assistant", "3"))
    stored = to_json(assets.chat.text_tokens(turns, num_images=0), assets.chat.fingerprint, digest_of(turns))
    corrected = (turns[0], Turn("assistant", "7"))
    untrained = (*turns, Turn("user", "So?"), Turn("assistant", "7"))
    old = {key: value for key, value in stored.items() if key != "of"}
    assert stored_tokens(Conversation(turns, (), stored), assets) is not None
    for other, entry in ((corrected, stored), (untrained, stored), (turns, old)):
        tokens = tokenize(Conversation(other, (), entry), assets, "k")
        assert np.array_equal(tokens.input_ids, assets.chat.text_tokens(other, num_images=0).ids)


def test_check_tokenises_again(data: Path, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--tokenizer-load-dir", str(hf), "--seq-length", "256", "--full", "--data-path"]
    assert check([*flags, str(edited(data / "stored", tmp_path / "good", lambda about: None))]) == 0
    capsys.readouterr()
    other = edited(data / "stored", tmp_path / "new", lambda about: about["messages"][1].update(content="Another one."))
    assert check([*flags, str(other)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"note, 1 sample: its text was changed after its {TOKENS_KEY} were made" in printed
    bad = edited(data / "stored", tmp_path / "bad", lambda about: about[TOKENS_KEY].update(trained=[0, 1]))
    assert check([*flags, str(bad)]) != 0
    assert f"{TOKENS_KEY} differ from the tokens of its text" in " ".join(capsys.readouterr().out.split())


def test_other_pixels_than_when_the_tokens_were_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Lengths of images depend on them: training says so, and with which flags it would be the same."""
    make_hf_qwen(tmp_path / "hf", "qwen2_5_vl")
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    counting = Counting(tmp_path / "hf", pixels=PixelRange(largest=5000))
    make(tmp_path / "rows.jsonl", tmp_path / "out", Options(counting=counting))
    origin = json.loads((tmp_path / "out" / ".nv-meta" / "tokens.json").read_text())
    assert origin["pixels"] == [24 * 24, 5000]
    same, other = counting.load(), load_assets(tmp_path / "hf")
    caplog.clear()
    warn_of_other_pixels([tmp_path / "out"], same.pixel_ranges)
    assert not caplog.records
    warn_of_other_pixels([tmp_path / "out"], other.pixel_ranges)
    (record,) = caplog.records
    assert "counted with images of 576 to 5000 pixels, but this run resizes them to 576 to 9216" in record.message
    assert "give --min-pixels 576 --max-pixels 5000, or prepare" in record.message
    caplog.clear()
    warn_of_other_pixels([tmp_path / "out"], same.pixel_ranges | {"pixels": PixelRange(700, 5000)})
    assert "this run resizes them to 700 to 5000" in caplog.text
