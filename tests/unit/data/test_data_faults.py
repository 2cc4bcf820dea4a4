"""Everything that may be wrong with samples and shards: one message each, with its place."""

from __future__ import annotations

import multiprocessing
import re
import shutil
import struct
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.samples import Skip
from llava_mcore.errors import DataError
from llava_mcore.training import fetch
from llava_mcore.training.fetch import SkipBudget
from tests.helpers.batches import FakeBatch
from tests.unit.data.test_data_loader import check_batch, open_loader, take
from tests.unit.data.test_data_shards import make_vqa, picture, prepare, select_shards, vqa_sample, write_shard

pytest_plugins = ("tests.helpers.llava_fixtures",)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vqa(tmp_path_factory.mktemp("data"), shards=2, samples=10)


def question(text: str) -> dict[str, Any]:
    return {"json": {"question": text}}


def mistyped_exif() -> bytes:
    """A JPEG to be turned, whose resolution is bytes instead of a fraction: Pillow raises TypeError."""
    orientation, resolution = (0x0112, 3, 1, 6), (0x011A, 7, 8, 38)  # the second one's value is after the list
    tags = b"".join(struct.pack("<HHII", *tag) for tag in (orientation, resolution))
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + tags + bytes(4) + b"abcdefgh"
    out = BytesIO()
    Image.new("RGB", (40, 30)).save(out, "JPEG", exif=exif)
    return out.getvalue()


def too_much_text() -> bytes:
    """A PNG with more text in it than Pillow unpacks: ValueError."""
    info, out = PngInfo(), BytesIO()
    info.add_text("workflow", "x" * 2_000_000, zip=True)
    Image.new("RGB", (40, 30)).save(out, "PNG", pnginfo=info)
    return out.getvalue()


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "broken image": ({"jpg": b"\xff\xd8 no image"}, r"the image cannot be decoded \(11 bytes\)"),
    "cut image": ({"jpg": picture(1)[:-100]}, "the image cannot be decoded .* truncated"),
    "mistyped EXIF": ({"jpg": mistyped_exif()}, r"the image cannot be decoded \(\d+ bytes\): bad operand"),
    "too much text in a PNG": (
        {"jpg": too_much_text()},
        "the image cannot be decoded .* Decompressed data too large",
    ),
    "half a character": (question("why \ud83d"), "the text contains an invalid character: .*surrogates"),
    "no image": ({"jpg": None}, "jpg"),
    "no question": ({"json": {"id": 1}}, "question"),
    "bad json": ({"json": "{"}, "part 'json' cannot be decoded"),
    "no answer": ({"txt": None}, "txt"),
    "empty answer": ({"txt": " \n"}, "the answer must be non-empty text"),
    "not utf-8": ({"txt": b"\xff\xfe\xfa"}, "part 'txt' cannot be decoded: 'utf-8' codec"),
    "question no text": ({"json": {"question": 3}}, "the question must be non-empty text, found 3"),
    "two marks": (question("<image> or <image>?"), "2 <image> in the conversation, but 1 images"),
    "mark in answer": ({"txt": "an <image>"}, "2 <image> in the conversation, but 1 images"),
    "too long": (question("why? " * 60), r"the sample has \d+ tokens .* data\.seq_length is 64"),
}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good sample before and after each fault, in shards of one fault each, prepared without complaint."""
    root = tmp_path_factory.mktemp("faulty")
    for number, (parts, _) in enumerate(FAULTS.values()):
        samples = [vqa_sample(100 + number), vqa_sample(number, **parts), vqa_sample(200 + number)]
        write_shard(root / f"{number:06d}.tar", samples)
    return prepare(root)


@pytest.mark.parametrize(("workers", "packing"), [(0, False), (1, False), (0, True)])
def test_every_fault_is_left_out_and_named(faulty: Path, assets: Assets, workers: int, packing: bool) -> None:
    """One epoch: every good sample, and a report of every broken one with its dataset, shard and key."""
    number_of_good = 2 * len(FAULTS)
    loader = open_loader(faulty, assets, workers=workers, shuffle=0, num_streams=1, micro_batch_size=1, packing=packing)
    batches = []
    while sum(len(batch.sample_keys) for batch in batches) < 2 * number_of_good:
        batches.append(next(loader))
        check_batch(batches[-1], assets)
    loader.close()
    keys = {key for batch in batches for key in batch.sample_keys}
    assert keys == {f"{100 * h + n:06d}" for h in (1, 2) for n in range(len(FAULTS))}
    found = sorted({str(skip) for batch in batches for skip in batch.skipped})
    assert len(found) == len(FAULTS)
    for number, (text, (_, reason)) in enumerate(zip(found, FAULTS.values(), strict=True)):
        assert text.startswith(f"{faulty}: shard {number:06d}.tar, sample {number:06d}")
        assert re.search(reason, text), text


def test_one_broken_picture_costs_a_pack_only_its_conversation(assets: Assets, tmp_path: Path) -> None:
    write_shard(tmp_path / "000000.tar", [vqa_sample(0), vqa_sample(1, jpg=b"no image"), vqa_sample(2)])
    prepare(tmp_path)
    loader = open_loader(
        tmp_path, assets, shuffle=0, num_streams=1, micro_batch_size=1, packing=True, packing_buffer_size=3,
        seq_length=256,
    )  # fmt: skip
    batch = next(loader)
    assert "000001" not in batch.sample_keys and {"000000", "000002"} <= set(batch.sample_keys)
    assert next(re.sub(".*: shard", "shard", str(skip)) for skip in batch.skipped) == (
        "shard 000000.tar, sample 000001 (jpg, json, txt), conversation 000001: "
        "the image cannot be decoded (8 bytes): no known format"
    )
    check_batch(batch, assets)


def test_too_long_may_be_cut_or_end_the_run(faulty: Path, assets: Assets) -> None:
    number = list(FAULTS).index("too long")
    select_shards(faulty, f"{number:06d}.tar")
    options: dict[str, Any] = {"shuffle": 0, "num_streams": 1, "micro_batch_size": 1}
    with pytest.raises(DataError, match=rf"sample {number:06d} .*{FAULTS['too long'][1]}"):
        take(open_loader(faulty, assets, on_too_long="error", **options), 3)
    # The question alone is too long: nothing to train on would be left.
    batches = take(open_loader(faulty, assets, on_too_long="truncate", **options), 3)
    assert "nothing to train on is left" in str(next(skip for batch in batches for skip in batch.skipped))
    # A token less than the good samples have: their answers lose their ends.
    length = batches[0].num_tokens - 1
    batches = take(open_loader(faulty, assets, on_too_long="truncate", seq_length=length, **options), 3)
    assert all(batch.sums["num_truncated"] == (1, 0) and batch.num_tokens == length for batch in batches)


def test_nothing_but_broken_samples(assets: Assets, tmp_path: Path) -> None:
    """After 100 in a row the loader gives up with one message, in a process of its own too."""
    write_shard(tmp_path / "000000.tar", (vqa_sample(n, txt=" ") for n in range(4)))
    prepare(tmp_path)
    messages = []
    others = multiprocessing.active_children()  # of earlier tests
    for workers in (0, 1):
        with pytest.raises(DataError, match=r"100 samples in a row cannot be used.*(?s:.*)the answer must be") as error:
            next(open_loader(tmp_path, assets, workers=workers, shuffle=0, num_streams=1))
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert set(multiprocessing.active_children()) <= set(others)


@pytest.mark.parametrize("packing", [False, True])
def test_broken_samples_between_good_ones_are_not_in_a_row(assets: Assets, tmp_path: Path, packing: bool) -> None:
    """More than 100 of them while a buffer of 64 fills, and over several batches; max_skip_rate limits them."""
    write_shard(tmp_path / "000000.tar", (vqa_sample(n, **({} if n % 4 == 3 else {"txt": " "})) for n in range(8)))
    prepare(tmp_path)
    loader = open_loader(
        tmp_path, assets, shuffle=0, num_streams=1, micro_batch_size=1, packing=packing, packing_buffer_size=64
    )
    num_skipped = sum(len(batch.skipped) for batch in take(loader, 1 if packing else 40))
    assert num_skipped > 100


def test_packs_whose_images_cannot_be_decoded_end_the_reading(assets: Assets, tmp_path: Path) -> None:
    write_shard(tmp_path / "000000.tar", (vqa_sample(n, jpg=b"no image") for n in range(4)))
    prepare(tmp_path)
    with pytest.raises(DataError, match=r"10\d samples in a row cannot be used.*(?s:.*)the image cannot be decoded"):
        next(open_loader(tmp_path, assets, shuffle=0, num_streams=1, packing=True, packing_buffer_size=3))


def test_fault_of_the_program_is_not_taken_for_bad_data(
    dataset: Path, assets: Assets, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise AttributeError("no such thing")

    monkeypatch.setattr("llava_mcore.data.loader.task_encoder.fit", fails)
    monkeypatch.setattr("llava_mcore.data.loader.task_encoder.tokenize", fails)
    with pytest.raises(DataError, match=r"shard 00000\d.tar, sample .*AttributeError: no such thing") as caught:
        next(open_loader(dataset, assets))
    assert isinstance(caught.value.__cause__, DataError)


@pytest.mark.parametrize("error", [MemoryError(), ImportError("no decoder"), RecursionError("too deep")], ids=repr)
def test_failures_of_the_system_are_named(
    dataset: Path, assets: Assets, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They end a run at the first sample, also while a resumed one reads the samples of its shuffle buffer again."""
    loader = open_loader(dataset, assets)
    take(loader, 16 * loader.num_streams)
    saved = loader.state()

    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr("llava_mcore.data.loader.task_encoder.tokenize", fails)
    expected = rf"cannot be read: {type(error).__name__}.*{error}.*0000\d\d"
    with pytest.raises(DataError, match=expected) as caught:
        next(open_loader(dataset, assets))
    assert ("lower data.num_workers" in str(caught.value)) == isinstance(error, MemoryError)
    with pytest.raises(DataError, match=expected):
        next(open_loader(dataset, assets, saved=[saved]))


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_damaged_shards(dataset: Path, assets: Assets, tmp_path: Path, damage: str) -> None:
    """Damaged before the start: told at once, all of them. Damaged while a run reads them: it ends."""
    copy = Path(shutil.copytree(dataset, tmp_path / "copy"))
    opened = [open_loader(copy, assets, workers=workers) for workers in (0, 1)]
    for shard in copy.glob("*.tar"):
        if damage == "cut":
            shard.write_bytes(shard.read_bytes()[:3000])
        else:
            shard.unlink()
    expected = "has 3000 bytes, but its index needs" if damage == "cut" else "is missing"
    with pytest.raises(DataError, match=rf"(?s)\(2 problems\).*000000\.tar {expected}.*000001\.tar {expected}"):
        open_loader(copy, assets)
    for loader in opened:
        with pytest.raises(DataError, match=r"copy cannot be read: .*00000\d\.tar"):
            take(loader, 24)


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

    def dies(source: object) -> None:
        raise error

    loader = open_loader(dataset, assets)
    monkeypatch.setattr("llava_mcore.data.loader.source.BatchSource.next", dies)
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
        "sample_type:\n  __module__: megatron.energon\n  __class__: CaptioningSample\n"
        "field_map:\n  image: jpg\n  caption: txt\n"
    )
    with pytest.raises(DataError, match=r"a CaptioningSample cannot be trained on.*VQASample --field-map '{.*}'"):
        next(open_loader(tmp_path, assets))
    (tmp_path / ".nv-meta" / "dataset.yaml").write_text(
        "sample_type: {__module__: nowhere, __class__: X}\nfield_map: {}\n"
    )
    with pytest.raises(DataError, match=r"dataset\.yaml.*nowhere"):
        open_loader(tmp_path, assets)


def test_a_sample_that_is_left_out_in_every_epoch_is_told_once() -> None:
    skips: list[object] = [Skip("shard 0, sample 3", "no image"), Skip("shard 1, sample 5", "no question")]
    batch = FakeBatch(*[torch.empty(0)] * 4, {}, torch.empty(0), num_tokens=0, sample_keys=[], skipped=skips)
    budget = SkipBudget(0.01)
    budget.report([batch, replace(batch, skipped=skips[:1])])
    assert list(budget.last) == ["shard 1, sample 5: no question", "shard 0, sample 3: no image"]


def test_the_rate_of_skips_is_that_of_at_least_a_thousand_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "agree", lambda groups, problem: [])
    groups: Any = None
    budget = SkipBudget(0.01)
    for used, skipped in ((0, 10), (990, 10), (9900, 100)):
        budget.check(groups, used, skipped)
    for used, skipped in ((0, 11), (9898, 100)):
        with pytest.raises(DataError, match=rf"{skipped} of {used + skipped} samples could not be used"):
            budget.check(groups, used, skipped)
