"""The whole pipeline: shards in, batches out, and every place restored exactly."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from llava_mcore.config.schema import DataConfig
from llava_mcore.data import loader as loader_module
from llava_mcore.data.assets import Assets, load_assets
from llava_mcore.data.collate import collate
from llava_mcore.data.loader import TrainLoader
from llava_mcore.data.samples import Batch, EncodedSample
from llava_mcore.errors import DataError
from tests.helpers.tiny_hf import make_hf_llava
from tests.unit.test_data_shards import make_vqa, picture, prepare, vqa_sample, write_shard

TENSORS = ("input_ids", "labels", "loss_mask", "position_ids", "pixel_values", "image_positions")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf")
    make_hf_llava(path)
    return path


@pytest.fixture(scope="module")
def assets(folder: Path) -> Assets:
    return load_assets(folder)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vqa(tmp_path_factory.mktemp("data"), shards=3, samples=16)


def open_loader(path: Path, assets: Assets, *, workers: int = 0, shuffle: int = 8, **options: Any) -> TrainLoader:
    data = DataConfig(
        path=path, num_workers=workers, seq_length=options.pop("seq_length", 64), shuffle_buffer_size=shuffle
    )
    return TrainLoader(data, assets, **({"micro_batch_size": 2, "dp_rank": 0, "dp_size": 1, "seed": 5} | options))


def take(loader: TrainLoader, number: int) -> list[Batch]:
    return [next(loader) for _ in range(number)]


def keys(batches: list[Batch]) -> list[list[str]]:
    return [batch.sample_keys for batch in batches]


def assert_equal(found: list[Batch], expected: list[Batch]) -> None:
    assert keys(found) == keys(expected)
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in TENSORS)


def check_batch(batch: Batch, assets: Assets) -> None:
    """What the model relies on."""
    b, s = batch.input_ids.shape
    ids = (batch.input_ids, batch.labels, batch.position_ids)
    assert all(t.shape == (b, s) and t.dtype == torch.int64 for t in ids)
    assert batch.loss_mask.shape == (b, s) and len(batch.sample_keys) == b
    assert batch.image_positions.dtype == torch.int64
    assert batch.loss_mask.dtype == batch.pixel_values.dtype == torch.float32
    assert batch.position_ids.tolist() == [list(range(s))] * b
    assert len(batch.image_positions) == assets.tokens_per_image * len(batch.pixel_values)
    flat = batch.input_ids.flatten()
    assert torch.equal(torch.nonzero(flat == assets.image_token_id)[:, 0], batch.image_positions)
    trained = batch.loss_mask.bool()
    assert torch.equal(batch.labels[:, :-1][trained[:, :-1]], batch.input_ids[:, 1:][trained[:, :-1]])
    assert not trained[:, -1].any() and not batch.labels[~trained].any()
    assert not (batch.labels[trained] == assets.pad_token_id).any()
    assert not (batch.labels[trained] == assets.image_token_id).any()
    for row in range(b):
        learnt = batch.labels[row][trained[row]]
        assert learnt[-1] == assets.eos_token_id and (learnt == assets.eos_token_id).sum() == 1


def test_batches_are_what_the_model_takes(dataset: Path, assets: Assets, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    loader = open_loader(dataset, assets, workers=1)
    seen: Counter[str] = Counter()
    for batch in take(loader, 48):
        check_batch(batch, assets)
        seen.update(batch.sample_keys)
        for row, key in enumerate(batch.sample_keys):
            answer = assets.tokenizer.decode(batch.labels[row][batch.loss_mask[row].bool()])
            expected = vqa_sample(int(key))
            assert answer == f" {expected['txt']}</s>"
            text = assets.tokenizer.decode(batch.input_ids[row]).replace("<image>", "").replace("<pad>", "")
            assert text == f"USER: \n{expected['json']['question']} ASSISTANT: {expected['txt']}</s>"
            assert torch.equal(batch.pixel_values[row], assets.images([expected["jpg"]])[0])
    assert seen.keys() == {f"{i:06d}" for i in range(48)} and sum(seen.values()) == 96
    loader.close()
    assert not multiprocessing.active_children()
    assert capfd.readouterr().out == ""


def test_collate_shifts_labels_and_places_pictures() -> None:
    def encoded(ids: list[int], trained: list[int], places: list[int]) -> EncodedSample:
        return EncodedSample(
            __key__=f"k{len(ids)}",
            __restore_key__=(),
            input_ids=torch.tensor(ids),
            trained=torch.tensor(trained, dtype=torch.bool),
            image_positions=torch.tensor(places, dtype=torch.int64),
            pixel_values=torch.ones(len(places) // 2, 3, 2, 2),
        )

    samples = [encoded([8, 7, 2], [0, 1, 1], []), encoded([4, 4, 9, 2, 10], [0, 0, 1, 1, 0], [0, 1])]
    batch = collate(samples, seq_length=5, pad_token_id=0)
    assert batch.input_ids.tolist() == [[8, 7, 2, 0, 0], [4, 4, 9, 2, 10]]
    # The first text token after a picture is learnt like any other of the answer.
    assert batch.labels.tolist() == [[7, 2, 0, 0, 0], [0, 9, 2, 0, 0]]
    assert batch.loss_mask.tolist() == [[1, 1, 0, 0, 0], [0, 1, 1, 0, 0]]
    assert batch.image_positions.tolist() == [5, 6] and batch.pixel_values.shape == (1, 3, 2, 2)
    assert batch.sample_keys == ["k3", "k5"]
    with pytest.raises(DataError, match=r"has 5 tokens .* data\.seq_length is 4"):
        collate(samples, seq_length=4, pad_token_id=0)


def test_batch_is_pinned_whole(dataset: Path, assets: Assets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor)
    batch = next(open_loader(dataset, assets))
    assert_equal([batch.pin_memory()], [batch])


def test_training_processes_random_numbers_are_left_alone(dataset: Path, assets: Assets) -> None:
    before = torch.get_rng_state()
    for workers in (0, 1):
        loader = open_loader(dataset, assets, workers=workers)
        take(loader, 3)
        loader.close()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("shuffle", [0, 8])
def test_ranks_and_workers_share_the_data_alike(dataset: Path, assets: Assets, shuffle: int) -> None:
    """1 rank x 2 workers, 2 ranks x 1 worker and 2 ranks x 0 workers: equal global batches of 2 micro-batches."""
    one = open_loader(dataset, assets, workers=2, shuffle=shuffle)
    expected = take(one, 12)
    one.close()
    for workers in (1, 0):
        ranks = [open_loader(dataset, assets, workers=workers, shuffle=shuffle, dp_rank=r, dp_size=2) for r in range(2)]
        assert_equal([next(rank) for _ in range(6) for rank in ranks], expected)
        for rank in ranks:
            rank.close()
    epoch = [key for batch in expected for key in batch.sample_keys]
    assert len(set(epoch)) == len(epoch) == 24  # half an epoch, nothing twice


def test_seed_changes_the_order(dataset: Path, assets: Assets) -> None:
    orders = [keys(take(open_loader(dataset, assets, seed=seed), 10)) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


RESUME = """
import sys, torch
from pathlib import Path
from tests.unit.test_data_loader import open_loader, take, load_assets
torch.set_num_threads(1)
assets = load_assets(Path(sys.argv[1]))
for workers in (0, 2):
    loader = open_loader(Path(sys.argv[2]), assets, workers=workers)
    loader.restore(torch.load(f"{sys.argv[3]}/state{workers}.pt", weights_only=True))
    torch.save(take(loader, 20), f"{sys.argv[3]}/batches{workers}.pt")
    loader.close()
"""


def test_resume_in_a_new_process(dataset: Path, assets: Assets, folder: Path, tmp_path: Path) -> None:
    """13 batches, state, new process, 20 batches: the tensors of the unbroken stream, over an epoch's end."""
    expected = {}
    for workers in (0, 2):
        loader = open_loader(dataset, assets, workers=workers)
        take(loader, 13)
        torch.save(loader.state(), tmp_path / f"state{workers}.pt")
        expected[workers] = take(loader, 20)
        loader.close()
    subprocess.run([sys.executable, "-c", RESUME, folder, dataset, tmp_path], check=True, cwd=Path(__file__).parents[2])
    for workers in (0, 2):
        assert_equal(torch.load(tmp_path / f"batches{workers}.pt", weights_only=False), expected[workers])


@pytest.mark.parametrize("seconds", [0.0, 60.0], ids=["fresh snapshots", "old snapshots"])
def test_saved_and_restored_again_and_again(
    dataset: Path, assets: Assets, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place saved right after a restore, before every worker has delivered, is no less exact."""
    monkeypatch.setattr(loader_module, "SECONDS_BETWEEN_SNAPSHOTS", seconds)
    steps = [9, 1, 0, 5]
    unbroken = open_loader(dataset, assets, workers=2)
    expected = take(unbroken, sum(steps))
    unbroken.close()
    found, state = [], None
    for number in steps:
        loader = open_loader(dataset, assets, workers=2)
        if state is not None:
            loader.restore(state)
        found += take(loader, number)
        state = loader.state()
        loader.close()
    assert_equal(found, expected)


def test_state_of_another_loader_is_refused(dataset: Path, assets: Assets, tmp_path: Path) -> None:
    state = open_loader(dataset, assets).state()
    other = make_vqa(tmp_path, shards=3, samples=16)
    loader = open_loader(other, assets, workers=1, shuffle=9, micro_batch_size=1, dp_rank=1, dp_size=2, seed=6)
    with pytest.raises(DataError) as caught:
        loader.restore(state)
    message = str(caught.value)
    for line in (
        "(7 problems)",
        "data-parallel size: saved with 1, now 2",
        "data-parallel rank: saved with 0, now 1",
        "data.num_workers: saved with 0, now 1",
        "data.shuffle_buffer_size: saved with 8, now 9",
        "training.micro_batch_size: saved with 2, now 1",
        "training.seed: saved with 5, now 6",
        "data (made by energon prepare): saved with",
    ):
        assert line in message
    for wrong in ({}, {"format": 0}, {**state, "place": {"__kind__": "os", "fields": {}}}, {**state, "place": 3}):
        with pytest.raises(DataError, match=r"no place in the data|cannot be restored"):
            open_loader(dataset, assets).restore(wrong)


def test_too_few_samples_for_the_streams(assets: Assets, tmp_path: Path) -> None:
    make_vqa(tmp_path, shards=1, samples=3)
    with pytest.raises(DataError, match=r"fewer samples than the 4 streams .* lower data\.num_workers"):
        for rank in range(2):
            open_loader(tmp_path, assets, workers=2, dp_rank=rank, dp_size=2)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One crude dataset with and without pictures, in other formats too, and blends of it."""
    root = tmp_path_factory.mktemp("mixed")
    samples = [vqa_sample(i, jpg=picture(i) if i % 2 else None) for i in range(12)]
    samples.append(vqa_sample(20, jpg=None, png=picture(20, "PNG", "RGBA"), json={"question": "Is <image> a digit?"}))
    write_shard(root / "crude" / "000000.tar", samples)
    prepare(root / "crude", "CrudeWebdataset")
    write_shard(root / "text" / "000000.tar", (vqa_sample(100 + i, jpg=None) for i in range(4)))
    prepare(root / "text", "CrudeWebdataset")
    make_vqa(root / "vqa", shards=1, samples=4)
    entries = "".join(f"      - weight: 1\n        path: ./{name}\n" for name in ("crude", "vqa", "text"))
    (root / "blend.yaml").write_text(
        f"__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n{entries}"
    )
    return root


def test_pictures_and_text_mix_in_one_dataset(mixed: Path, assets: Assets) -> None:
    batches = take(open_loader(mixed / "crude", assets), 13)
    for batch in batches:
        check_batch(batch, assets)
        pictures = [int(key) % 2 == 1 or key == "000020" for key in batch.sample_keys]
        assert len(batch.pixel_values) == sum(pictures)
        placed = (batch.input_ids == assets.image_token_id).sum(1)
        assert placed.tolist() == [assets.tokens_per_image * has for has in pictures]
    assert {len(batch.pixel_values) for batch in batches} == {0, 1, 2}


def test_batches_of_text_only(mixed: Path, assets: Assets) -> None:
    for batch in take(open_loader(mixed / "text", assets), 3):
        check_batch(batch, assets)
        assert batch.pixel_values.shape == (0, 3, 56, 56) and batch.image_positions.shape == (0,)
        assert "<image>" not in assets.tokenizer.decode(batch.input_ids[0])


def test_blends(mixed: Path, assets: Assets) -> None:
    """Standard and crude datasets in one blend; its place is restored exactly."""
    loader = open_loader(mixed / "blend.yaml", assets)
    seen = {int(key) // 100 for batch in take(loader, 15) for key in batch.sample_keys}
    state, expected = loader.state(), take(loader, 10)
    assert seen == {0, 1}
    again = open_loader(mixed / "blend.yaml", assets)
    again.restore(state)
    assert_equal(take(again, 10), expected)
