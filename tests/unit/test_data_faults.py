"""Everything that may be wrong with samples and shards: one message each, with its place."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llava_mcore.data.assets import Assets, load_assets
from llava_mcore.data.samples import Batch
from llava_mcore.errors import DataError
from tests.helpers.tiny_hf import make_hf_llava
from tests.unit.test_data_loader import open_loader, take
from tests.unit.test_data_shards import make_vqa, picture, prepare, select_shards, vqa_sample, write_shard


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    path = tmp_path_factory.mktemp("hf")
    make_hf_llava(path)
    return load_assets(path)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vqa(tmp_path_factory.mktemp("data"), shards=2, samples=10)


def question(text: str) -> dict[str, Any]:
    return {"json": {"question": text}}


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "broken picture": ({"jpg": b"\xff\xd8 no picture"}, r"the picture cannot be decoded \(13 bytes\)"),
    "cut picture": ({"jpg": picture(1)[:-100]}, "the picture cannot be decoded .* truncated"),
    "no picture": ({"jpg": None}, "jpg"),
    "no question": ({"json": {"id": 1}}, "question"),
    "bad json": ({"json": "{"}, "part 'json' cannot be decoded"),
    "no answer": ({"txt": None}, "txt"),
    "empty answer": ({"txt": " \n"}, "the answer must be text that is not empty"),
    "not utf-8": ({"txt": b"\xff\xfe\xfa"}, "part 'txt' cannot be decoded: 'utf-8' codec"),
    "question no text": ({"json": {"question": 3}}, "the question must be text that is not empty, found 3"),
    "two marks": (question("<image> or <image>?"), "2 <image> in the conversation, but 1 pictures"),
    "mark in answer": ({"txt": "an <image>"}, "2 <image> in the conversation, but 1 pictures"),
    "too long": (question("why? " * 60), r"the sample has \d+ tokens .* data\.seq_length is 64"),
}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One shard of one sample for each fault, prepared without complaint."""
    root = tmp_path_factory.mktemp("faulty")
    for number, (parts, _) in enumerate(FAULTS.values()):
        write_shard(root / f"{number:06d}.tar", [vqa_sample(number, **parts)])
    return prepare(root)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_names_dataset_shard_and_sample(faulty: Path, assets: Assets, fault: str) -> None:
    number = list(FAULTS).index(fault)
    select_shards(faulty, f"{number:06d}.tar")
    loader = open_loader(faulty, assets)
    place = rf"shard {number:06d}\.tar, sample {number:06d} .*: "
    with pytest.raises(DataError, match=f"{place}.*{FAULTS[fault][1]}") as caught:
        next(loader)
    assert str(caught.value).startswith(str(faulty)) and caught.value.__cause__ is not None
    with pytest.raises(DataError, match="closed"):
        next(loader)


def test_fault_in_a_loader_process_reads_the_same(faulty: Path, assets: Assets) -> None:
    select_shards(faulty, "000000.tar")
    messages = []
    for workers in (0, 1):
        with pytest.raises(DataError) as caught:
            next(open_loader(faulty, assets, workers=workers))
        messages.append(str(caught.value))
    assert messages[0] == messages[1] and "\n" not in messages[0]
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_shard_damaged_after_preparing(dataset: Path, assets: Assets, tmp_path: Path, damage: str) -> None:
    copy = Path(shutil.copytree(dataset, tmp_path / "copy"))
    for shard in copy.glob("*.tar"):
        if damage == "cut":
            shard.write_bytes(shard.read_bytes()[:3000])
        else:
            shard.unlink()
    for workers in (0, 1):
        with pytest.raises(DataError, match=r"copy cannot be read: .*00000\d\.tar"):
            take(open_loader(copy, assets, workers=workers), 24)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "),
        RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"),
        ConnectionResetError(104, "Connection reset by peer"),
        EOFError(),
    ],
    ids=repr,
)
def test_killed_loader_process_is_reported(
    dataset: Path, assets: Assets, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch raises for a dead process, depending on where it notices it."""

    def dies() -> Iterator[Batch]:
        raise error
        yield

    loader = open_loader(dataset, assets)
    monkeypatch.setattr(loader, "_batches", dies())
    with pytest.raises(DataError, match=r"a loader process was killed .* lower data\.num_workers"):
        next(loader)


def test_other_sample_types_are_refused(tmp_path: Path, assets: Assets) -> None:
    write_shard(tmp_path / "000000.tar", [vqa_sample(0)])
    prepare(tmp_path)
    (tmp_path / ".nv-meta" / "dataset.yaml").write_text(
        "sample_type:\n  __module__: megatron.energon\n  __class__: TextSample\nfield_map:\n  text: txt\n"
    )
    with pytest.raises(DataError, match=r"TextSample cannot be trained on.*text-only samples as CrudeWebdataset"):
        next(open_loader(tmp_path, assets))
    (tmp_path / ".nv-meta" / "dataset.yaml").write_text(
        "sample_type: {__module__: nowhere, __class__: X}\nfield_map: {}\n"
    )
    with pytest.raises(DataError, match=r"dataset\.yaml.*nowhere"):
        open_loader(tmp_path, assets)
