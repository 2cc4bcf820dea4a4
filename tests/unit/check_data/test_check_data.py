"""`check --data-path`: what it reads, counts, prints and decides. What it finds wrong is in test_bad_data_table.py."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llava_mcore.check_data.examiner import Examiner
from llava_mcore.check_data.finding import Finding
from llava_mcore.check_data.scan import choose, scan
from llava_mcore.check_data.show import conversation_text
from llava_mcore.cli.check import main
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.storage.dataset_path import check_dataset
from llava_mcore.errors import DataError
from llava_mcore.media.batch_fields import FEATURE_POSITIONS
from llava_mcore.media.media import MediaTokens, SameTokens, Size
from tests.helpers.bad_data_files import BLEND
from tests.helpers.bad_data_makers import ANSWERED, ASKED, GOOD, good, index, messages, picture, write_tar

pytest_plugins = ("tests.helpers.llava_fixtures",)

TALK = messages(
    ("user", "Compare <image><image>"),
    ("assistant", "Both are gray ramps."),
    ("user", "And this: <image>?"),
    ("assistant", "漢字 too."),
)
TALK_PARTS: dict[str, Any] = {"json": TALK} | {f"{i}.jpg": picture() for i in range(3)}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards: good samples; one broken among ten; conversations with several images."""
    folder = tmp_path_factory.mktemp("data")
    write_tar(folder / "000000.tar", {f"a{i}": GOOD for i in range(6)})
    write_tar(folder / "000001.tar", {f"b{i}": GOOD | ({"0.jpg": b""} if i == 7 else {}) for i in range(10)})
    write_tar(folder / "000002.tar", {f"c{i}": TALK_PARTS for i in range(4)})
    return index(folder)


def check(data: Path, hf: Path, *flags: str) -> int:
    return main(["--data-path", str(data), "--tokenizer-load-dir", str(hf), "--seq-length", "128", *flags])


def report(data: Path, hf: Path, tmp_path: Path, *flags: str) -> dict[str, Any]:
    check(data, hf, "--json", str(tmp_path / "report.json"), *flags)
    return json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))


def num_tokens(assets: Assets, parts: dict[str, Any]) -> int:
    """Placeholders and text, counted by Hugging Face's own chat template."""
    turns = []
    for message in parts["json"]["messages"]:
        pieces = [piece for piece in re.split("\n?(<image>)\n?", message["content"]) if piece]
        content = [{"type": "image"} if piece == "<image>" else {"type": "text", "text": piece} for piece in pieces]
        turns.append({"role": message["role"], "content": content})
    ids = assets.tokenizer.apply_chat_template(turns, return_dict=False)
    return len(ids) + sum(name.endswith("jpg") for name in parts) * (assets.plan.tokens_per_tile - 1)


def test_report_counts_what_is_there(dataset: Path, hf: Path, assets: Assets, tmp_path: Path) -> None:
    found = report(dataset, hf, tmp_path, "--max-skip-rate", "0.05")
    assert found["train"] and found["full"]
    assert (found["looked_at"], found["left_out"]) == (20, 1)
    short, long = num_tokens(assets, dict(GOOD)), num_tokens(assets, TALK_PARTS)
    tokens = found["tokens_per_sample"]
    assert (tokens["p50"], tokens["p90"], tokens["max"]) == (short, long, long)
    assert sum(count for _, _, count in tokens["histogram"]) == 20
    assert found["images_per_sample"] == {"1": 15, "3": 4}
    assert found["epoch"] == {
        "samples": 19,
        "tokens": 15 * short + 4 * long,
        "images": 27,
        "videos": 0,
        "frames": 0,
    } | {"audios": 0}
    assert 0.5 < found["packing"]["fill"] <= 1
    (group,) = found["groups"]
    assert group["level"] == "left out" and group["examples"] == [[str(dataset), "000001.tar", "b7"]]


def test_number_of_broken_samples_decides(dataset: Path, hf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(dataset, hf, "--max-skip-rate", "0.05") == 0
    assert capsys.readouterr().out.rstrip().endswith("train: 1 of 20 samples would be left out")
    assert check(dataset, hf, "--max-skip-rate", "0.04") == 2
    out = capsys.readouterr().out
    assert "do not train: 1 of 20 samples would be left out, more than --max-skip-rate 0.04" in out.splitlines()[-1]
    assert "1 would be left out: the image cannot be decoded (0 bytes): no known format" in out
    assert f"    {dataset}: shard 000001.tar, sample b7\n" in out


def test_too_long_for_the_sequence_is_left_out(dataset: Path, hf: Path, tmp_path: Path) -> None:
    found = report(dataset, hf, tmp_path, "--seq-length", "64")
    reasons = {group["count"]: group["reason"] for group in found["groups"]}
    assert "data.seq_length is 64" in reasons[4] and found["left_out"] == 5
    assert found["tokens_per_sample"]["max"] > 64


def test_more_patches_than_the_budget_are_left_out(
    dataset: Path, hf: Path, assets: Assets, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are listed as what is too long is, and a pack is filled up to both budgets, as in training."""
    each = assets.plan.patches_per_tile
    free = report(dataset, hf, tmp_path, "--max-skip-rate", "0.05")
    expected = {"p50": each, "p99": 3 * each, "max": 3 * each, "unit": "patches of images and frames"}
    assert free["media_tokens_per_sample"] == expected and free["max_media_tokens"] is None
    capsys.readouterr()
    found = report(dataset, hf, tmp_path, "--max-media-tokens", str(2 * each))
    reasons = {group["count"]: group["reason"] for group in found["groups"]}
    assert f"{3 * each} patches of images and frames, but data.max_media_tokens is {2 * each}" in reasons[4]
    assert found["left_out"] == 5 and found["media_tokens_per_sample"] == expected
    assert found["packing"]["fill"] < free["packing"]["fill"]
    out = capsys.readouterr().out
    assert f"patches of images and frames per sample (data.max_media_tokens): p50 {each}  p99 {3 * each}  max" in out
    short = num_tokens(assets, dict(GOOD))
    fill = min(2, 128 // short) * short / 128
    assert f"packs of --seq-length 128 and --max-media-tokens {2 * each}: {fill:.1%} full with --packing" in out


def test_budgets_that_no_picture_fits_are_refused(dataset: Path, hf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(dataset, hf, "--seq-length", "16", "--max-media-tokens", "3") == 2
    error = capsys.readouterr().err
    assert "data.seq_length is 16, but an image alone has at least 16 tokens" in error
    assert "data.max_media_tokens is 3, but the smallest image has 16 patches" in error


def test_processes_do_not_change_the_report(dataset: Path, hf: Path, tmp_path: Path) -> None:
    reports = [report(dataset, hf, tmp_path, "--num-workers", str(number)) for number in (0, 2)]
    for one in reports:
        one.pop("seconds")
    assert reports[0] == reports[1]


def test_killed_process_is_reported(dataset: Path, assets: Assets, monkeypatch: pytest.MonkeyPatch) -> None:
    examiner = Examiner(dataset, assets, seq_length=64)
    monkeypatch.setattr(examiner, "examine", lambda *_: os._exit(1))
    with pytest.raises(DataError, match=r"a process was killed .*lower --num-workers"):
        scan(examiner, choose(examiner.datasets, full=True), num_workers=1, on_finding=print)


def test_shown_conversation_marks_what_is_learnt(dataset: Path, assets: Assets) -> None:
    examiner = Examiner(dataset, assets, seq_length=128)
    tokens = examiner.conversations(examiner.examine(0, 16))[0]
    text = conversation_text(tokens, assets, colored=False).plain
    assert re.findall("«(.*?)»", text, re.DOTALL) == [" Both are gray ramps.</s>", " 漢字 too.</s>"]
    mark = "<image \N{MULTIPLICATION SIGN}16>"
    assert f"{mark}\n{mark}\n" in text and text.count("<image") == 3
    colored = conversation_text(tokens, assets, colored=True)
    green = [colored.plain[span.start : span.end] for span in colored.spans if "green" in str(span.style)]
    assert "".join(green) == " Both are gray ramps.</s> 漢字 too.</s>" and "«" not in colored.plain


def test_shows_as_many_as_asked_for(dataset: Path, hf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (0, 3):
        check(dataset, hf, "--show", str(number))
        assert len(re.findall(r"^sample \w+ of", capsys.readouterr().out, re.MULTILINE)) == number


def test_shown_samples_are_of_different_kinds(dataset: Path, hf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten conversations with one image come before the first with several."""
    check(dataset, hf, "--show", "2")
    first, second = re.findall(r"^sample (\w)\d of", capsys.readouterr().out, re.MULTILINE)
    assert first in "ab" and second == "c"


def test_shows_one_sample_by_its_key(dataset: Path, hf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for key in ("c2", "000002.tar/c2"):
        assert check(dataset, hf, "--show", key) == 0
        out = capsys.readouterr().out
        assert "漢字 too.</s>»" in out and "sample c2 of 000002.tar: trained on" in out and "packs" not in out
    assert check(dataset, hf, "--show", "b7") == 2
    assert re.search(r"sample b7 of 000001\.tar: left out\n.*image", capsys.readouterr().out)
    for key in ("000001.tar/c2", "000000007"):
        assert check(dataset, hf, "--show", key) == 2
        assert f"no sample {key} in the train part of" in capsys.readouterr().err


class WrongTokens(SameTokens):
    """Has a feature less than placeholders."""

    def tokens(self, sizes: Sequence[Size]) -> list[MediaTokens]:
        positions = {FEATURE_POSITIONS: np.arange(self.tokens_per_tile - 1)}
        return [dataclasses.replace(x, values=positions) for x in super().tokens(sizes)]


def test_model_input_that_does_not_fit_ends_training(dataset: Path, assets: Assets) -> None:
    """Assets that contradict themselves, as a fault in our own code or in a folder would make them."""
    wrong = dataclasses.replace(assets, plan=WrongTokens(assets.plan.image_token_id, 16, 16))
    found = Examiner(dataset, wrong, seq_length=64).examine(0, 0)
    assert found.status == "stop" and found.reasons == (
        "16 placeholders, but 15 features of 1 images, videos and audio clips",
    )
    other_eos = dataclasses.replace(assets, eos_token_id=0)
    assert Examiner(dataset, other_eos, seq_length=64).examine(0, 0).remarks == (
        "1 answers, but 1 trained spans with 0 EOS",
    )
    assert Examiner(dataset, assets, seq_length=64).examine(0, 0).remarks == ()


def test_counts_of_another_template_are_noticed(hf: Path, assets: Assets, tmp_path: Path) -> None:
    about = messages(ASKED, ANSWERED) | {"num_tokens": num_tokens(assets, dict(GOOD))}
    write_tar(tmp_path / "data" / "0.tar", {f"a{i}": GOOD | {"json": about} for i in range(3)})
    data = index(tmp_path / "data")
    assert not report(data, hf, tmp_path)["groups"]
    (group,) = report(data, hf, tmp_path, "--chat-template", "vicuna", "--seq-length", "256")["groups"]
    assert group["count"] == 3 and "another token count than when it was prepared" in group["reason"]


def test_packs_written_beforehand(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    member = messages(("user", "Hi"), ("assistant", "Yes."))
    packs = {"json": {"pack": [member, GOOD["json"], GOOD["json"]]}, "0.jpg": picture(), "1.jpg": picture()}
    write_tar(tmp_path / "0.tar", {"a": packs, "b": packs | {"0.jpg": b""}})
    assert check(index(tmp_path), hf, "--max-skip-rate", "0.2") == 0
    out = capsys.readouterr().out
    assert "2 samples packed when written: train with --packing" in out
    assert out.rstrip().endswith("train: 1 of 6 samples would be left out")


def test_blends(hf: Path, tmp_path: Path) -> None:
    """Shares and repetitions of a blend are reported for each dataset, with the samples of an epoch."""
    for name in "ab":
        good(tmp_path / name)
    blend = tmp_path / "blend.yaml"
    blend.write_text(BLEND + "      - {weight: 3, path: ./a}\n      - {weight: 1, path: ./b}\n")
    found = report(blend, hf, tmp_path)
    assert found["train"] and found["epoch"] is None
    assert [(d["share"], d["num_seen"]) for d in found["datasets"]] == [("75.0%", 4), ("25.0%", 4)]
    entries = "      - {repetitions: 3, path: ./a}\n      - {path: ./b, subset: {range: [25%, 75%]}}\n"
    blend.write_text(BLEND.replace("blend:", "blend_epochized:") + entries)
    found = report(blend, hf, tmp_path)
    assert [d["num_seen"] for d in found["datasets"]] == [4, 2]
    assert found["datasets"][0]["share"] == "x 3" and found["epoch"]["samples"] == 3 * 4 + 2


def test_samples_taken_out_in_the_split_are_not_counted(hf: Path, assets: Assets, tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", {f"a{i}": GOOD | ({"0.jpg": b""} if i == 1 else {}) for i in range(4)})
    index(tmp_path)
    split = {"split_parts": {"train": ["0.tar"], "val": [], "test": []}, "exclude": ["0.tar/a1"]}
    (tmp_path / ".nv-meta" / "split.yaml").write_text(json.dumps(split))
    assert Examiner(tmp_path, assets, seq_length=64).examine(0, 1) == Finding(0, 1, "0.tar", "number 1", "excluded")
    found = report(tmp_path, hf, tmp_path)
    assert found["train"] and found["conversations"] == found["epoch"]["samples"] == 3


def test_files_are_checked_however_many_there_are(tmp_path: Path) -> None:
    for shard in range(60):
        write_tar(tmp_path / f"{shard:03d}.tar", {f"{shard}": {"json": "{}"}})
    index(tmp_path)
    for shard in range(0, 60, 2):
        (tmp_path / f"{shard:03d}.tar").unlink()
    with pytest.raises(DataError) as caught:
        check_dataset(tmp_path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 22 and "10 more shards with such problems" in lines[-1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give either a model to check (--hf-dir"),
        (["--hf-dir", "a", "--data-path", "b"], "give either a model to check"),
        (["--data-path", "b"], "--data-path needs --tokenizer-load-dir"),
        (["--data-path", "b", "--tokenizer-load-dir", "nowhere"], "no tokenizer in nowhere"),
        (["--data-path", "b", "--tokenizer-load-dir", "t", "--seq-length", "0"], "--seq-length must be at least 1"),
        (["--data-path", "b", "--tokenizer-load-dir", "t", "--max-skip-rate", "2"], "from 0 to 1"),
        (["--data-path", "b", "--tokenizer-load-dir", "t", "--full", "--show", "07"], "and --show 07 only that one"),
        (["--data-path", "b", "--tokenizer-load-dir", "t", "--show", "-1"], "--show must be at least 0"),
    ],
)
def test_flags_that_make_no_sense(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    assert message in capsys.readouterr().err


def test_report_that_cannot_be_written(dataset: Path, hf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(dataset, hf, "--json", str(dataset / "no" / "report.json")) == 2
    assert "the report cannot be written" in capsys.readouterr().err


def test_path_that_does_not_exist(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path / "gone", hf) == 2
    out = capsys.readouterr().out
    assert "gone does not exist" in out and out.splitlines()[-1].startswith("do not train: the dataset")


def test_packs_that_hold_all_samples(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The estimate of fill does not claim more samples than there are."""
    write_tar(tmp_path / "0.tar", {f"a{i}": GOOD for i in range(3)})
    assert check(index(tmp_path), hf, "--seq-length", "4096") == 0
    out = capsys.readouterr().out
    assert "packs of --seq-length 4096: with --packing, one holds all 3 samples, and training repeats them" in out
