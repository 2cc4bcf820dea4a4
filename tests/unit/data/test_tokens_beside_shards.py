"""Tokens in files beside the shards: the batches are those without them, and a damaged or old file is named."""

from __future__ import annotations

import errno
import logging
import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llava_mcore.config.sections.data import LIMITS
from llava_mcore.data.encode.assets import Assets, load_assets
from llava_mcore.data.encode.encode import check_length, check_media, stored_text
from llava_mcore.data.loader.datasets import Dataset
from llava_mcore.data.samples import IMAGE_MARK, Conversation, Turn, Video
from llava_mcore.data.storage import stored_tokens
from llava_mcore.data.storage.stored_tokens import HEAD, StoredTokens, TokensOfShard
from llava_mcore.errors import DataError
from llava_mcore.prepare.shard_plan import Counting, Options
from tests.helpers.prepare_cases import chat_cases, make, write_sharegpt
from tests.unit.data.test_data_loader import assert_equal, open_loader, take

pytest_plugins = ("tests.helpers.llava_fixtures",)

OPTIONS: dict[str, Any] = {"seq_length": 256, "num_streams": 2}
NUM_BATCHES = 12


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, hf: Path) -> Path:
    folder = tmp_path_factory.mktemp("data")
    source = write_sharegpt(folder / "src", [c for c in chat_cases() if c.turns[0][0] != "system"] * 2)
    make(source, folder / "stored", Options(8, counting=Counting(hf)))
    make(source, folder / "packs", Options(8, counting=Counting(hf), pack_to=256))
    return folder


@pytest.fixture
def copy(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the data to damage, in a process that has not warned yet."""
    monkeypatch.setattr(stored_tokens, "_WARNED", set())
    return Path(shutil.copytree(data / "stored", tmp_path / "stored"))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of the samples whose json is decoded."""
    keys: list[str] = []
    decode = Dataset.decode

    def noted(self: Dataset, parts: Any) -> Any:
        keys.append(parts.data[0]["__key__"])
        return decode(self, parts)

    monkeypatch.setattr(Dataset, "decode", noted)
    return keys


def first_shard(folder: Path) -> Path:
    """Return the file of tokens of the first shard."""
    return folder / "000000.tar.tokens"


def test_no_json_is_decoded_and_nothing_changes(data: Path, copy: Path, assets: Assets, decoded: list[str]) -> None:
    for file in copy.glob("*.tokens"):
        file.unlink()
    for packing in (False, True):
        beside, within = (open_loader(path, assets, packing=packing, **OPTIONS) for path in (data / "stored", copy))
        batches = take(beside, NUM_BATCHES)
        assert not decoded
        assert_equal(batches, take(within, NUM_BATCHES))
        assert decoded
        decoded.clear()


def test_other_tokens_and_other_text_are_not_used(
    data: Path, copy: Path, hf: Path, assets: Assets, decoded: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """With another template, in packs, and in a sample whose text was changed, the json counts."""
    take(open_loader(copy, load_assets(hf, chat_template="vicuna"), **OPTIONS), 2)
    take(open_loader(data / "packs", assets, packing=True, **OPTIONS), 2)
    assert decoded
    shard = copy / "000000.tar"
    content = shard.read_bytes()
    place = content.index(b'"content":"') + len(b'"content":"')
    shard.write_bytes(content[:place] + content[place : place + 40].swapcase() + content[place + 40 :])
    decoded.clear()
    take(open_loader(copy, assets, **OPTIONS), NUM_BATCHES)
    assert len(set(decoded)) == 1 and "cannot be used" not in caplog.text


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut": (lambda content: content[:-20], "it was truncated"),
    "empty": (lambda content: b"", "it does not begin as such a file does"),
    "a bit in an entry": (
        lambda content: content[:-3] + bytes([content[-3] ^ 1]) + content[-2:],
        "a checksum is wrong",
    ),
    "header": (lambda content: content[:30] + b"\0" * 40 + content[70:], "cannot be used: "),
}


@pytest.mark.parametrize("what", [*DAMAGE, "another shard"])
def test_what_is_wrong_is_said_once(
    what: str, copy: Path, data: Path, assets: Assets, caplog: pytest.LogCaptureFixture
) -> None:
    file = first_shard(copy)
    if what == "another shard":
        message = "it belongs to a shard of"
        with (copy / "000000.tar").open("ab") as shard:
            shard.write(bytes(10240))  # of another size, but with the same samples
    else:
        change, message = DAMAGE[what]
        file.write_bytes(change(file.read_bytes()))
    with caplog.at_level(logging.WARNING):
        found = take(open_loader(copy, assets, **OPTIONS), NUM_BATCHES)
    assert caplog.text.count("000000.tar.tokens cannot be used: ") == 1 and message in caplog.text
    assert "prepare the data again" in caplog.text
    assert_equal(found, take(open_loader(data / "stored", assets, **OPTIONS), NUM_BATCHES))


def test_tokens_are_used_for_their_own_sample_and_within_the_limits_of_the_run(assets: Assets) -> None:
    """Else another text, other images, or the same ones in another order would be trained on."""
    picture, text = assets.plan.image_token_id, b"{}"
    ids = np.array([picture, 9, picture], np.uint32)
    stored = StoredTokens(zlib.crc32(text), 3, 2, ids, np.array([1, 2], np.uint32))
    parts = {"__key__": "a", "json": text, "0.jpg": b"one", "1.png": b"two"}
    found = stored_text(parts, stored, assets)
    assert found is not None and found[0].ids.tolist() == ids.tolist() and found[1].images == (b"one", b"two")
    assert found[0].trained.tolist() == [False, True, False]
    at_limits = replace(assets, limits=replace(LIMITS, text_chars=3, sample_bytes=6))
    assert stored_text(parts, stored, at_limits) is not None
    for other in (
        parts | {"json": b"{ }"},
        {"__key__": "a", "json": text, "1.png": b"two", "0.jpg": b"one"},
        {"__key__": "a", "json": text, "0.jpg": b"one"},
        parts | {"2.jpg": b"three"},
        parts | {"1.png": "decoded"},
    ):
        assert stored_text(other, stored, assets) is None, other
    for wrong in (replace(stored, num_images=1), replace(stored, ids=ids[1:])):
        assert stored_text(parts, wrong, assets) is None
    for limits in (replace(LIMITS, text_chars=2), replace(LIMITS, sample_bytes=5)):
        assert stored_text(parts, stored, replace(assets, limits=limits)) is None
    assert stored_text(parts, stored, replace(assets, refused={IMAGE_MARK: "no images"})) is None


def test_what_is_at_a_limit_may_be_trained_on(assets: Assets) -> None:
    limits = replace(LIMITS, text_chars=3, frames=2, sample_bytes=4)
    talk, clip = [Turn("user", "abc")], Conversation((), (), videos=(Video((b"ab", b"cd")),))
    check_length(talk, limits)
    check_media(clip, replace(assets, limits=limits, refused={}))
    with pytest.raises(DataError, match="has 3 characters; the limit is 2"):
        check_length(talk, replace(limits, text_chars=2))
    for field, message in (("frames", "have 2 frames; the limit is 1"), ("sample_bytes", "4 bytes; the limit is 3")):
        one_less = replace(limits, **{field: getattr(limits, field) - 1})
        with pytest.raises(DataError, match=message):
            check_media(clip, replace(assets, limits=one_less, refused={}))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EIO])
def test_files_that_cannot_be_opened(copy: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """If the process has too many open files, others have to be closed; any other error means no tokens."""

    def fails(*_: object, **__: object) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(stored_tokens, "open_regular_file", fails)
    if number == errno.EIO:
        assert stored_tokens.open_tokens(copy / "000000.tar") is None
    else:
        with pytest.raises(OSError, match="no"):
            stored_tokens.open_tokens(copy / "000000.tar")


def test_an_entry_comes_back(data: Path) -> None:
    shard = TokensOfShard(data / "stored" / "000000.tar")
    entry = shard.entry(0)
    assert entry is not None
    data_of_entry = entry.to_bytes()
    again = StoredTokens.from_bytes(data_of_entry)
    assert again.ids.tolist() == entry.ids.tolist() and again.spans.tolist() == entry.spans.tolist()
    assert len(data_of_entry) == HEAD.size + 4 * (len(entry.ids) + len(entry.spans))
    with pytest.raises(ValueError, match="no sample 8"):
        shard.entry(8)
    shard.close()
