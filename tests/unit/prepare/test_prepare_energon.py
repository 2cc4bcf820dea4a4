"""The importer's folders under energon: they load, lint, split and blend; token counts are those of training."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from megatron.energon import Cooker, DefaultTaskEncoder, WorkerConfig, get_loader, get_train_dataset, get_val_dataset
from megatron.energon.cli.main import main as energon
from PIL import Image

from llava_mcore.__main__ import main
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.encode.conversation import TextDecoder, cook_chat
from llava_mcore.data.samples import IMAGE_MARK, ChatSample, Turn
from llava_mcore.data.storage.dataset_path import check_dataset
from llava_mcore.errors import DataError
from llava_mcore.prepare.listing import read_listing
from llava_mcore.prepare.output.finish import split_shards
from llava_mcore.prepare.shard_plan import Counting, Options
from tests.helpers import prepare_cases as cases
from tests.helpers.encoding import encoded
from tests.helpers.prepare_cases import Case, chat_cases, contents, make, picture, read_back, vqa_cases

pytest_plugins = ("tests.helpers.llava_fixtures",)


WORKERS = WorkerConfig(rank=0, world_size=1, num_workers=0)


class Cook(DefaultTaskEncoder):
    """Reads as training does, and batches nothing."""

    decoder = TextDecoder()
    cookers = (Cooker(cook_chat),)

    def encode_sample(self, sample: ChatSample) -> ChatSample:
        return sample

    def batch(self, samples: list[ChatSample]) -> list[ChatSample]:
        return samples


def load(path: Path, part: str = "train", number: int | None = None) -> list[ChatSample]:
    """All samples of a part, or so many of the endless stream of training."""
    settings: dict[str, Any] = {"batch_size": 1, "task_encoder": Cook(), "worker_config": WORKERS}
    if number is None:
        return [batch[0] for batch in get_loader(get_val_dataset(path, split_part=part, **settings))]
    stream = get_train_dataset(path, shuffle_buffer_size=None, max_samples_per_sequence=None, **settings)
    return [batch[0] for batch, _ in zip(get_loader(stream), range(number), strict=False)]


def origins(samples: list[ChatSample]) -> Counter[str]:
    """How many samples come from which folder."""
    return Counter(Path(str(sample.__sources__[0].dataset_path)).name for sample in samples)


def messages(sample: ChatSample) -> list[list[dict[str, str]]]:
    return [[{"role": t.role, "content": t.text} for t in c.turns] for c in sample.conversations]


def test_energon_reads_what_was_written(tmp_path: Path) -> None:
    make(cases.write_sharegpt(tmp_path / "src", chat_cases()), tmp_path / "out")
    assert check_dataset(tmp_path / "out") == [tmp_path / "out"]
    found = load(tmp_path / "out")
    assert [messages(s)[0] for s in found] == [case.content["messages"] for case in chat_cases()]
    assert [list(s.conversations[0].images) for s in found] == [list(case.pictures) for case in chat_cases()]


def _tables(folder: Path) -> list[list[Any]]:
    with contextlib.closing(sqlite3.connect(folder / ".nv-meta" / "index.sqlite")) as db:
        return [db.execute(f"SELECT * FROM {name} ORDER BY 1, 3, 2, 4").fetchall() for name in INDEX_TABLES]


INDEX_TABLES = ("samples", "sample_parts")


def test_the_meta_data_are_those_of_energon_prepare(tmp_path: Path) -> None:
    """The same shards, prepared by energon's own command."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    make(cases.write_sharegpt(tmp_path / "src", chat_cases()), ours)
    theirs.mkdir()
    for path in ours.glob("*.tar"):
        (theirs / path.name).write_bytes(path.read_bytes())
    command = [
        "prepare",
        str(theirs),
        "--non-interactive",
        "--split-ratio",
        "1,0,0",
        "--sample-type",
        "CrudeWebdataset",
    ]
    energon([*command, "--num-workers", "1", "--no-progress"], standalone_mode=False)
    names = {path.name for path in (theirs / ".nv-meta").iterdir()}
    assert names == {path.name for path in (ours / ".nv-meta").iterdir()} - {"lint.yaml"}
    for name in names - {"index.uuid", "index.sqlite"}:
        one, other = (yaml.safe_load((folder / ".nv-meta" / name).read_text()) for folder in (ours, theirs))
        assert one == other, name
    assert [p.read_bytes() for p in sorted(ours.glob("*.idx"))] == [
        p.read_bytes() for p in sorted(theirs.glob("*.idx"))
    ]
    assert _tables(ours) == _tables(theirs)
    # Without the notes of the writers, shards are read for the same rows.
    noted = _tables(ours)
    assert not list((ours / ".prepare").glob("*.rows.json"))
    shutil.rmtree(ours / ".nv-meta")
    make(tmp_path / "src" / "sharegpt.json", ours)
    assert _tables(ours) == noted


def test_energon_lint(tmp_path: Path) -> None:
    """Energon's own check passes what `prepare` writes, and finds a shard that was cut off."""
    make(cases.write_sharegpt(tmp_path / "src", chat_cases()), tmp_path / "out")
    lint = ["lint", str(tmp_path / "out"), "--dataset-config", "lint.yaml"]
    assert CliRunner().invoke(energon, lint).exit_code == 0
    with (tmp_path / "out" / "000001.tar").open("r+b") as file:
        file.truncate(2000)
    assert CliRunner().invoke(energon, lint).exit_code == 1


def test_validation_shards(tmp_path: Path) -> None:
    """A share of the shards, at least one and never all, is for validation."""
    make(cases.write_parquet(tmp_path / "src", vqa_cases(20)), tmp_path / "out", Options(4, val_ratio=0.01))
    parts = {part: {messages(s)[0][0]["content"] for s in load(tmp_path / "out", part)} for part in ("train", "val")}
    assert (len(parts["train"]), len(parts["val"])) == (16, 4) and not parts["train"] & parts["val"]
    names = [f"{i}.tar" for i in range(10)]
    assert {r: len(split_shards(names, r)["val"]) for r in (0.0, 0.01, 0.2, 0.9)} == {0.0: 0, 0.01: 1, 0.2: 2, 0.9: 9}
    with pytest.raises(DataError, match="lower --samples-per-shard"):
        split_shards(names, 1.0)
    with pytest.raises(DataError, match="--val-ratio needs at least two shards, but the 20 rows make one of 1000"):
        make(tmp_path / "src" / "data.parquet", tmp_path / "one", Options(1000, val_ratio=0.1))
    assert not (tmp_path / "one").exists()


def test_token_counts_are_those_of_training(hf: Path, assets: Assets, tmp_path: Path) -> None:
    source = cases.write_sharegpt(tmp_path / "src", [c for c in chat_cases() if c.turns[0][0] != "system"])
    result = make(source, tmp_path / "out", Options(4, counting=Counting(hf)))
    samples, total = read_back(tmp_path / "out"), 0
    other = make(source, tmp_path / "other", Options(4, counting=Counting(hf, "vicuna")))
    assert other.counts.tokens.total != result.counts.tokens.total
    for sample in samples:
        turns = [Turn(m["role"], m["content"]) for m in sample["messages"]]
        num_tokens = assets.plan.tokens_per_tile
        tokens = encoded(assets.chat, turns, num_images=len(sample["pictures"]), num_tokens=num_tokens)
        assert sample["num_tokens"] == len(tokens.input_ids) > num_tokens * len(sample["pictures"])
        total += len(tokens.input_ids)
    assert (result.counts.tokens.total, result.counts.tokens.count) == (total, len(samples))


def test_a_wrong_tokenizer_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    source = cases.write_sharegpt(tmp_path / "src", chat_cases())
    with pytest.raises(DataError, match="no tokenizer in"):
        make(source, tmp_path / "out", Options(counting=Counting(tmp_path / "src")))
    assert not (tmp_path / "out").exists()


def test_packs(hf: Path, tmp_path: Path) -> None:
    """All conversations are there once, in packs no longer than asked; longer ones are skipped."""
    rows = [*vqa_cases(40), Case((("user", "Tell a story."), ("assistant", "word " * 300)))]
    source = cases.write_llava_lines(tmp_path / "src", rows)
    options = Options(20, counting=Counting(hf), pack_to=200)
    result = make(source, tmp_path / "out", options, max_skip_rate=0.1)
    assert result.counts.reasons == {"longer than a pack": 1}
    packs: dict[str, list[dict[str, Any]]] = {}
    for sample in read_back(tmp_path / "out"):
        packs.setdefault(sample["key"], []).append(sample)
    assert max(sum(s["num_tokens"] for s in pack) for pack in packs.values()) <= 200
    assert len(packs) == result.counts.entries < 40 == result.counts.conversations
    found = {
        s["source"]["index"]: {"messages": s["messages"], "pictures": s["pictures"]} for p in packs.values() for s in p
    }
    assert found == {i: case.content for i, case in enumerate(rows[:40])}
    assert sum(len(s.conversations) for s in load(tmp_path / "out")) == 40


def test_packs_for_context_parallelism(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With their lengths rounded up, packs fit; without, `check` names those that do not."""
    source = cases.write_llava_lines(tmp_path / "src", vqa_cases(60))
    sizes = {}
    for name, multiple in (("rounded", 16), ("tight", 1)):
        options = Options(60, counting=Counting(hf), pack_to=256, sample_multiple=multiple)
        make(source, tmp_path / name, options)
        packs: dict[str, list[int]] = {}
        for sample in read_back(tmp_path / name):
            packs.setdefault(sample["key"], []).append(sample["num_tokens"])
        assert sum(map(len, packs.values())) == 60
        sizes[name] = [sum(-(-n // 16) * 16 for n in pack) for pack in packs.values()]
    assert max(sizes["rounded"]) <= 256 < max(sizes["tight"])
    flags = [
        "check",
        "--tokenizer-load-dir",
        str(hf),
        "--seq-length",
        "256",
        "--sample-multiple",
        "16",
        "--full",
        "--show",
        "0",
    ]
    assert main([*flags, "--data-path", str(tmp_path / "rounded")]) == 0
    told = capsys.readouterr().out
    assert "packs of --seq-length 256, lengths rounded up to multiples of 16: " in told
    assert main([*flags, "--data-path", str(tmp_path / "tight")]) == 2
    too_long = sum(size > 256 for size in sizes["tight"])
    told = " ".join(capsys.readouterr().out.split())
    assert f"{too_long} would be left out: a pack of " in told and "rounded up to multiples of 16 (--cp)" in told


def write_listing(folder: Path, **changes: dict[str, Any]) -> Path:
    text = [Case((("user", f"What is {i} + 1?"), ("assistant", str(i + 1)))) for i in range(8)]
    cases.write_llava(folder / "chat", vqa_cases(12))
    cases.write_triples(folder / "vqa", vqa_cases(8))
    cases.write_llava_lines(folder / "text", text)
    sources: list[dict[str, Any]] = [
        {"path": "chat/llava.json", "name": "chat"},
        {"path": "vqa/triples", "subflavors": {"prompts": "short"}},
        {"path": "text/llava.jsonl", "name": "text"},
    ]
    sources = [source | changes.get(source.get("name", "triples"), {}) for source in sources]
    (folder / "list.yaml").write_text(yaml.safe_dump({"sources": sources}))
    return folder / "list.yaml"


def command(source: Path, out: Path, *more: object) -> list[str]:
    return [str(part) for part in ("prepare", source, "--out", out, "--num-workers", 0, *more)]


def test_a_list_becomes_a_blend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listing = write_listing(tmp_path, chat={"weight": 3}, triples={"weight": 2})
    out = tmp_path / "out"
    assert main(command(listing, out, "--samples-per-shard", 4, "--val-ratio", 0.3)) == 0
    assert f"train with --data-path {out / 'blend.yaml'}" in capsys.readouterr().out
    assert check_dataset(out / "blend.yaml") == [out / "chat", out / "triples", out / "text"]
    found = load(out / "blend.yaml", number=600)
    kinds = origins(found)
    assert kinds["chat"] == pytest.approx(300, abs=50) and kinds["triples"] == pytest.approx(200, abs=50)
    assert {s.__subflavors__.get("prompts") for s in found} == {None, "short"}
    assert {len(s.conversations[0].images) for s in found} == {0, 1}
    assert len(load(out / "blend.yaml", "val")) == 12


def test_a_list_with_epochs(tmp_path: Path) -> None:
    """Sources are repeated as often as the list says."""
    listing = write_listing(tmp_path, chat={"epochs": 2}, text={"epochs": 0.5})
    assert main(command(listing, tmp_path / "out")) == 0
    found = load(tmp_path / "out" / "blend.yaml", number=36)
    assert origins(found) == {
        "chat": 24,
        "triples": 8,
        "text": 4,
    }


def test_a_list_grows_and_is_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A source that fails leaves no blend; what is done is not done again; weights may change."""
    listing, out = write_listing(tmp_path, text={"path": "text/gone.jsonl"}), tmp_path / "out"
    assert main(command(listing, out)) == 2
    assert "gone.jsonl does not exist" in capsys.readouterr().err
    assert not (out / "blend.yaml").exists() and check_dataset(out / "chat")
    before = (out / "chat" / "000000.tar").stat().st_mtime_ns
    content = yaml.safe_load(listing.read_text())
    content["sources"][0]["weight"], content["sources"][2]["path"] = 5, "text/llava.jsonl"
    listing.write_text(yaml.safe_dump(content))
    assert main(command(listing, out)) == 0
    assert (out / "chat" / "000000.tar").stat().st_mtime_ns == before
    assert yaml.safe_load((out / "blend.yaml").read_text())["splits"]["train"]["blend"][0]["weight"] == 5


def test_bad_lists_and_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each mistake in a list or its flags is refused with what to change."""
    listing = write_listing(tmp_path, chat={"weight": 1, "name": "triples"}, text={"epochs": 2})
    with pytest.raises(DataError) as caught:
        read_listing(listing)
    assert "two sources have the name 'triples'" in str(caught.value) and "choose one of them" in str(caught.value)
    listing.write_text(
        "sources: [{path: .data.jsonl}, {path: ../..}, {path: a, name: ''}, {path: b, name: blend.yaml}]"
    )
    with pytest.raises(DataError) as caught:
        read_listing(listing)
    assert str(caught.value).count("cannot be the name of a folder; give the source another `name`") == 3
    listing.write_text("sources: [{path: .data.jsonl}, {path: more/.rows.tar.gz}]")
    assert [*read_listing(listing).by_name()] == ["data", "rows"]
    listing.write_text("sources:\n- {path: a, wieght: 2}\n- {path: b, weight: -1}\n")
    with pytest.raises(DataError, match=r"(?s)2 problems.*sources\.0\.wieght.*sources\.1\.weight"):
        read_listing(listing)
    assert main(command(listing, tmp_path / "out", "--image-key", "x", "--pack-to", 9)) == 2
    told = capsys.readouterr().err
    assert "--image-key belongs to each source" in told and "--pack-to needs --tokenizer-load-dir" in told
    assert main(command(listing, tmp_path / "out", "--pack-to", 9, "--sample-multiple", 4)) == 2
    assert "--pack-to 9 is not a multiple of --sample-multiple 4" in capsys.readouterr().err
    assert main(command(listing, tmp_path / "out", "--sample-multiple", 4)) == 2
    assert "--sample-multiple needs --pack-to" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["prepare", "--help"])
    assert "exit codes: 0 finished; 2 wrong input" in capsys.readouterr().out


def test_what_the_user_sees(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        *vqa_cases(30),
        Case((("user", f"{IMAGE_MARK}\nWide?"), ("assistant", "Yes.")), (picture(0, size=(700, 9)),)),
    ]
    source, out = cases.write_llava(tmp_path / "src", rows), tmp_path / "out"
    assert main(command(source, out, "--tokenizer-load-dir", hf, "--keep-order")) == 0
    shown = capsys.readouterr().out
    manifest = json.loads((out / "manifest.json").read_text())
    for told in ("31", f"{manifest['totals']['tokens']['total']:,}", "0 (0.00%)", "1 (1 new)", "largest 700"):
        assert told in shown
    for name in ("tokens.png", "pixels.png"):
        with Image.open(out / name) as image:
            assert image.size == (840, 480) and len(image.convert("L").getcolors() or ()) > 20
    assert [s["samples"] for s in manifest["shards"]] == [31] and manifest["sources"][0]["file"] == "llava.json"
    assert contents(out) == [case.content for case in rows]
