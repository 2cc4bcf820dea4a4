"""The whole pipeline: shards in, batches out, and every place restored exactly."""

from __future__ import annotations

import logging
import multiprocessing
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import Assets, load_assets
from llava_mcore.data.loader.train_loader import TrainLoader
from llava_mcore.data.loader.turns import default_num_streams
from llava_mcore.data.processors.load import PROCESSOR_FILES
from llava_mcore.data.samples import Batch
from llava_mcore.errors import ConfigError, DataError
from tests.helpers.conversions import forkserver
from tests.helpers.encoding import tiles
from tests.helpers.tiny_hf import make_hf_llava
from tests.unit.data.test_data_shards import make_vqa, picture, prepare, vqa_sample, write_shard

TENSORS = ("input_ids", "labels", "loss_mask", "position_ids")


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
    """`options`: fields of the data configuration, and arguments of the loader."""
    fields = {name: options.pop(name) for name in set(options) & set(DataConfig.model_fields)}
    data = DataConfig(path=path, num_workers=workers, shuffle_buffer_size=shuffle, **({"seq_length": 64} | fields))
    return TrainLoader(data, assets, **({"micro_batch_size": 2, "dp_rank": 0, "dp_size": 1, "seed": 5} | options))


def take(loader: TrainLoader, number: int) -> list[Batch]:
    return [next(loader) for _ in range(number)]


def keys(batches: list[Batch]) -> list[list[str]]:
    return [batch.sample_keys for batch in batches]


def assert_equal(found: list[Batch], expected: list[Batch]) -> None:
    assert keys(found) == keys(expected)
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in TENSORS)
        assert one.media.keys() == other.media.keys()
        assert all(torch.equal(one.media[name], other.media[name]) for name in one.media)


def check_batch(batch: Batch, assets: Assets) -> None:
    """What the model relies on."""
    b, s = batch.input_ids.shape
    ids = (batch.input_ids, batch.labels, batch.position_ids)
    assert all(t.shape == (b, s) and t.dtype == torch.int64 for t in ids)
    assert batch.loss_mask.shape == (b, s)
    pixels, positions = batch.media["pixel_values"], batch.media["feature_positions"]
    assert positions.dtype == torch.int64
    assert batch.loss_mask.dtype == torch.float32
    assert pixels.dtype == torch.uint8 and batch.media["pixel_scale"].shape == (2, 3)
    assert len(positions) == assets.plan.tokens_per_tile * len(pixels)
    flat = batch.input_ids.flatten()
    assert torch.equal(torch.nonzero(flat == assets.plan.image_token_id)[:, 0], positions)
    trained = batch.loss_mask.bool()
    assert torch.equal(batch.labels[:, :-1][trained[:, :-1]], batch.input_ids[:, 1:][trained[:, :-1]])
    assert not batch.labels[~trained].any()
    assert not (batch.labels[trained] == assets.pad_token_id).any()
    assert not (batch.labels[trained] == assets.plan.image_token_id).any()
    bounds = batch.cu_seqlens.tolist() or [row * s for row in range(b + 1)]
    spans = [slice(*pair) for pair in pairwise(bounds)]
    assert bounds[0] == 0 and bounds[-1] == b * s and len(spans) - len(batch.sample_keys) in (0, 1)
    for number, span in enumerate(spans):
        positions = batch.position_ids.flatten()[span]
        assert torch.equal(positions, torch.arange(len(positions)))
        targets = batch.labels.flatten()[span][trained.flatten()[span]]
        if number < len(batch.sample_keys):  # after them comes padding
            assert targets[-1] == assets.eos_token_id and (targets == assets.eos_token_id).sum() == 1
        assert not trained.flatten()[span][-1]


def test_batches_are_what_the_model_takes(dataset: Path, assets: Assets, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    before = multiprocessing.active_children()  # a manager of energon's `prepare`, perhaps
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
            assert torch.equal(batch.media["pixel_values"][row], tiles(assets.images, [expected["jpg"]])[0])
    assert seen.keys() == {f"{i:06d}" for i in range(48)} and sum(seen.values()) == 96
    loader.close()
    assert multiprocessing.active_children() == before
    assert capfd.readouterr().out == ""


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


@pytest.mark.parametrize(("packing", "workers"), [(False, 2), (True, 0)])
def test_a_step_is_read_again(dataset: Path, assets: Assets, packing: bool, workers: int) -> None:
    """The batch of a step that was not finite, after the loader has gone on."""
    loader = open_loader(dataset, assets, workers=workers, packing=packing, dp_rank=1, dp_size=2)
    take(loader, 5)
    before = loader.state()
    step, random = take(loader, 4), torch.get_rng_state()
    take(loader, 2)
    assert_equal(loader.read_again(before, 4), step)
    assert torch.equal(torch.get_rng_state(), random)
    after = loader.state()
    assert_equal(loader.read_again(after, 1), take(loader, 1))
    loader.close()


@pytest.mark.parametrize("packing", [False, True])
def test_ranks_and_workers_change_nothing(dataset: Path, assets: Assets, packing: bool) -> None:
    """Any number of ranks and loader processes: the same global batches of 4 micro-batches, tensor by tensor."""
    options: dict[str, Any] = {"num_streams": 8, "packing": packing, "packing_buffer_size": 5}
    one = open_loader(dataset, assets, **options)
    expected = take(one, 24)
    for dp, workers in ((2, 1), (4, 0), (1, 3), (1, 9)):
        ranks = [open_loader(dataset, assets, workers=workers, dp_rank=r, dp_size=dp, **options) for r in range(dp)]
        steps = [[take(rank, 4 // dp) for rank in ranks] for _ in range(6)]
        for rank in ranks:
            rank.close()
        # Rank r's j-th micro-batch of a step is the step's micro-batch number j * dp + r.
        assert_equal([step[r][j] for step in steps for j in range(4 // dp) for r in range(dp)], expected)


def test_seed_changes_the_order(dataset: Path, assets: Assets) -> None:
    orders = [keys(take(open_loader(dataset, assets, seed=seed), 10)) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def resume_elsewhere(folder: Path, dataset: Path, out: Path) -> None:
    """What the new process does."""
    torch.set_num_threads(1)
    assets = load_assets(folder)
    for workers in (0, 2):
        saved = [torch.load(out / f"state{workers}.pt", weights_only=True)]
        loader = open_loader(dataset, assets, workers=workers, saved=saved)
        torch.save(take(loader, 20), out / f"batches{workers}.pt")
        loader.close()


def test_resume_in_a_new_process(dataset: Path, assets: Assets, folder: Path, tmp_path: Path) -> None:
    """13 batches, state, new process, 20 batches: the tensors of the uninterrupted stream, over an epoch's end."""
    expected = {}
    for workers in (0, 2):
        loader = open_loader(dataset, assets, workers=workers)
        take(loader, 13)
        torch.save(loader.state(), tmp_path / f"state{workers}.pt")
        expected[workers] = take(loader, 20)
        loader.close()
    process = forkserver().Process(target=resume_elsewhere, args=(folder, dataset, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == 0
    for workers in (0, 2):
        assert_equal(torch.load(tmp_path / f"batches{workers}.pt", weights_only=False), expected[workers])


def test_stopped_at_random_and_resumed_on_other_ranks(dataset: Path, assets: Assets) -> None:
    """Twelve stops, each time another number of ranks and loader processes: the uninterrupted run's batches.

    Steps have 4 micro-batches, and every number of ranks divides them and the streams.
    """
    random = Random(8)
    options: dict[str, Any] = {"num_streams": 8, "packing": True, "packing_buffer_size": 5}
    found: list[Batch] = []
    saved: list[dict[str, Any]] | None = None
    for _ in range(12):
        dp, workers = random.choice((1, 2, 4)), random.choice((0, 0, 1, 2))
        ranks = [
            open_loader(dataset, assets, workers=workers, dp_rank=r, dp_size=dp, saved=saved, **options)
            for r in range(dp)
        ]
        for _ in range(random.randrange(3)):
            parts = [take(rank, 4 // dp) for rank in ranks]
            found += [parts[r][j] for j in range(4 // dp) for r in range(dp)]
        saved = [rank.state() for rank in ranks]
        for rank in ranks:
            rank.close()
    uninterrupted = open_loader(dataset, assets, **options)
    assert len(found) > 40
    assert_equal(found, take(uninterrupted, len(found)))


def test_stopped_at_ranks_that_do_not_divide_the_streams(
    dataset: Path, assets: Assets, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps of 30 micro-batches of 4 streams on 3, 1, 10 and 5 ranks: the batches of one rank, and a warning."""
    options: dict[str, Any] = {"num_streams": 4, "micro_batch_size": 1, "packing": True, "packing_buffer_size": 5}
    uninterrupted = open_loader(dataset, assets, **options)
    saved: list[dict[str, Any]] | None = None
    for dp, workers in ((3, 0), (1, 0), (10, 0), (5, 1)):
        caplog.clear()
        ranks = [
            open_loader(dataset, assets, workers=workers, dp_rank=r, dp_size=dp, saved=saved, **options)
            for r in range(dp)
        ]
        assert ("do not divide the 4 streams" in caplog.text) == (dp != 1)
        parts = [take(rank, 30 // dp) for rank in ranks]
        assert_equal([parts[r][j] for j in range(30 // dp) for r in range(dp)], take(uninterrupted, 30))
        saved = [rank.state() for rank in ranks]
        for rank in ranks:
            rank.close()


@pytest.mark.parametrize("samples", [3, 25, 120])
def test_few_samples_are_the_same_batches_on_any_number_of_ranks(assets: Assets, tmp_path: Path, samples: int) -> None:
    path = make_vqa(tmp_path, shards=1, samples=samples)
    orders = {}
    for dp, workers in ((1, 0), (2, 1), (6, 0)):
        ranks = [
            open_loader(path, assets, workers=workers, dp_rank=r, dp_size=dp, micro_batch_size=1) for r in range(dp)
        ]
        parts = [keys(take(rank, 24 // dp)) for rank in ranks]
        orders[dp] = [parts[r][j] for j in range(24 // dp) for r in range(dp)]
        for rank in ranks:
            rank.close()
    assert all(order == orders[1] for order in orders.values())


def test_default_number_of_streams() -> None:
    """It depends on the number of samples alone; large data has more, for more ranks."""
    assert [default_num_streams(n) for n in (1, 25, 120, 199_999, 200_000, 10**7)] == [48, 48, 48, 48, 768, 768]


@pytest.mark.parametrize("packing", [False, True])
def test_smaller_micro_batches_lose_nothing(
    dataset: Path, assets: Assets, packing: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As after an out-of-memory error: each of 2 streams continues with its very next sample."""
    caplog.set_level(logging.INFO, logger="llava_mcore")
    options: dict[str, Any] = {"num_streams": 2, "packing": packing, "packing_buffer_size": 5}
    uninterrupted = open_loader(dataset, assets, micro_batch_size=1, **options)
    per_stream: dict[int, list[str]] = {0: [], 1: []}
    for number, batch in enumerate(take(uninterrupted, 120)):
        per_stream[number % 2] += batch.sample_keys
    seen: dict[int, list[str]] = {0: [], 1: []}
    turns, size_before = [0, 0], 4
    saved: list[dict[str, Any]] | None = None
    for size, number, workers in ((4, 7, 0), (4, 2, 1), (2, 9, 2), (1, 5, 0), (1, 21, 1)):
        loader = open_loader(dataset, assets, micro_batch_size=size, saved=saved, workers=workers, **options)
        turns, size_before = [count * size_before // size for count in turns], size
        for batch in take(loader, number):
            stream = turns.index(min(turns))
            turns[stream] += 1
            seen[stream] += batch.sample_keys
        saved = [loader.state()]
        loader.close()
    assert sum(map(len, seen.values())) >= 36 + 18 + 26
    said = [x.getMessage() for x in caplog.records if "other samples" in x.getMessage()]
    assert [x.partition(":")[0] for x in said] == [
        "micro-batches have 2 samples now, and had 4",
        "micro-batches have 1 samples now, and had 2",
    ]
    assert all(keys_ == per_stream[n][: len(keys_)] for n, keys_ in seen.items())
    with pytest.raises(DataError, match=r"training\.micro_batch_size: saved with 1, now 2; it may become 1$"):
        open_loader(dataset, assets, micro_batch_size=2, saved=saved, **options)


def test_packs_of_another_length_are_refused(dataset: Path, assets: Assets) -> None:
    saved = [open_loader(dataset, assets, packing=True).state()]
    with pytest.raises(DataError, match=r"data\.seq_length: saved with 64, now 128"):
        open_loader(dataset, assets, seq_length=128, saved=saved, packing=True)
    saved = [open_loader(dataset, assets).state()]
    assert keys(take(open_loader(dataset, assets, seq_length=128, saved=saved), 1))


def test_settings_that_drop_samples_belong_to_a_position(dataset: Path, assets: Assets) -> None:
    state = open_loader(dataset, assets, packing=True).state()
    others: dict[str, Any] = {
        **{"max_media_tokens": 2000, "on_too_long": "truncate", "max_sample_bytes": 2**20},
        **{"max_text_chars": 999, "max_image_pixels": 10**6, "max_frames": 7},
    }
    with pytest.raises(DataError, match=r"data\.max_media_tokens: saved with none, now 2000") as caught:
        open_loader(dataset, assets, packing=True, saved=[state], **others)
    assert all(f"data.{name}: saved with" in str(caught.value) for name in others)
    # As version 0.1.0 called it.
    settings = state["settings"]
    earlier = {name: value for name, value in settings.items() if name != "data.max_image_pixels"}
    earlier["data.max_picture_pixels"] = settings["data.max_image_pixels"]
    with pytest.raises(DataError, match=r"data\.max_image_pixels: saved with 178956970, now 1000000"):
        saved = [state | {"settings": earlier}]
        open_loader(dataset, assets, packing=True, saved=saved, max_image_pixels=10**6)
    limited = open_loader(dataset, assets, **others).state()
    with pytest.raises(DataError, match=r"data\.max_media_tokens: saved with 2000, now none"):
        open_loader(dataset, assets, saved=[limited], **others | {"max_media_tokens": None})


def test_other_settings_of_the_processor_are_refused(dataset: Path, assets: Assets, tmp_path: Path) -> None:
    state = open_loader(dataset, assets).state()
    make_hf_llava(tmp_path)
    (file,) = (tmp_path / name for name in PROCESSOR_FILES if (tmp_path / name).is_file())
    text = file.read_text()
    padded = text.replace("CLIPImageProcessor", "LlavaImageProcessor")
    padded = padded.replace('"do_resize"', '"do_pad": true,\n"do_resize"')
    changes = {
        re.sub(r'"image_mean": \[[^]]*\]', '"image_mean": [0.5, 0.5, 0.5]', text): (
            r"image processor: image_mean: saved with \[0\.48.*, now \[0\.5, 0\.5, 0\.5\]$"
        ),
        padded: r"(?s)image processor: class: saved with CLIPImage.*do_pad: saved with none, now True",
    }
    for changed, expected in changes.items():
        file.write_text(changed)
        other = load_assets(tmp_path)
        with pytest.raises(DataError, match=expected):
            open_loader(dataset, other, saved=[state])
        with pytest.raises(DataError, match="image processor: "):
            open_loader(dataset, assets, saved=[open_loader(dataset, other).state()])


def test_state_of_another_loader_is_refused(dataset: Path, assets: Assets, tmp_path: Path) -> None:
    state = open_loader(dataset, assets).state()
    other = make_vqa(tmp_path, shards=3, samples=16)
    with pytest.raises(DataError) as caught:
        open_loader(other, assets, shuffle=9, seed=6, packing=True, num_streams=4, saved=[state])
    message = str(caught.value)
    for line in (
        "(5 problems)",
        "data.num_streams: saved with 48, now 4",
        "data.shuffle_buffer_size: saved with 8, now 9",
        "data.packing: saved with False, now True",
        "training.seed: saved with 5, now 6",
        "data (made by energon prepare): saved with",
    ):
        assert line in message
    half = open_loader(dataset, assets, dp_size=2).state()
    with pytest.raises(DataError, match=r"incomplete: streams \[1, 3, 5, "):
        open_loader(dataset, assets, saved=[half])
    order = {"counts": [1, 2], "credits": [0.0, 0.0]}
    state["streams"][0] = {"order": order, "waiting": [], "num_batches": 1, "num_tokens": 9, "num_iterations": 1.0}
    for version in (1, 2, 3, 4):
        with pytest.raises(DataError, match=rf"format {version}\), which read the samples in another order.* --name "):
            open_loader(dataset, assets, saved=[{"format": version}])
    for wrong in ([], [{}], [{"format": 0}]):
        with pytest.raises(DataError, match="not a position in the data"):
            open_loader(dataset, assets, saved=wrong)
    with pytest.raises(DataError, match=r"cannot be restored: .*a position of 2 datasets, but there are 1"):
        open_loader(dataset, assets, saved=[state])
    del state["streams"][0]["num_tokens"]
    state["streams"][0]["order"] = {"counts": [1], "credits": [0.0]}
    with pytest.raises(DataError, match=r"cannot be restored: KeyError\('num_tokens'\)"):
        open_loader(dataset, assets, saved=[state])


def test_one_sample_is_enough(assets: Assets, tmp_path: Path) -> None:
    make_vqa(tmp_path, shards=1, samples=1)
    for packing in (False, True):
        loader = open_loader(tmp_path, assets, packing=packing)
        assert {key for batch in take(loader, 50) for key in batch.sample_keys} == {"000000"}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One crude dataset with and without images, in other formats too, and blends of it."""
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
    batches = take(open_loader(mixed / "crude", assets, num_streams=1), 13)
    for batch in batches:
        check_batch(batch, assets)
        pictures = [int(key) % 2 == 1 or key == "000020" for key in batch.sample_keys]
        assert len(batch.media["pixel_values"]) == sum(pictures)
        placed = (batch.input_ids == assets.plan.image_token_id).sum(1)
        assert placed.tolist() == [assets.plan.tokens_per_tile * has for has in pictures]
    assert {len(batch.media["pixel_values"]) for batch in batches} == {0, 1, 2}


def test_batches_of_text_only(mixed: Path, assets: Assets) -> None:
    """Batches without images have empty pixels and no placeholder."""
    for batch in take(open_loader(mixed / "text", assets), 3):
        check_batch(batch, assets)
        assert batch.media["pixel_values"].shape == (0, 3, 56, 56) and batch.media["feature_positions"].shape == (0,)
        assert "<image>" not in assets.tokenizer.decode(batch.input_ids[0])


def test_blends(mixed: Path, assets: Assets) -> None:
    """Standard and crude datasets in one blend; its place is restored exactly."""
    loader = open_loader(mixed / "blend.yaml", assets)
    seen = {int(key) // 100 for batch in take(loader, 15) for key in batch.sample_keys}
    state, expected = loader.state(), take(loader, 10)
    assert seen == {0, 1}
    again = open_loader(mixed / "blend.yaml", assets, saved=[state])
    assert_equal(take(again, 10), expected)


@pytest.mark.parametrize(("repetitions", "streams"), [(0.5, 1), (1.5, 4), (2.3, 2), (0.04, 4), (2, 4)])
def test_repetitions_that_are_no_whole_number(assets: Assets, tmp_path: Path, repetitions: float, streams: int) -> None:
    """After every round each stream has given rounds * repetitions * samples, give or take one."""
    for name, first in (("one", 0), ("two", 500)):
        write_shard(tmp_path / name / "000000.tar", [vqa_sample(first + i) for i in range(40)])
        prepare(tmp_path / name)
    entries = f"[{{repetitions: 1, path: ./one}}, {{repetitions: {repetitions}, path: ./two}}]"
    blend = (
        f"__module__: megatron.energon\n__class__: MetadatasetV2\nsplits: {{train: {{blend_epochized: {entries}}}}}\n"
    )
    (tmp_path / "blend.yaml").write_text(blend)
    options: dict[str, Any] = {"num_streams": streams, "micro_batch_size": 1}
    loader = open_loader(tmp_path / "blend.yaml", assets, shuffle=0, **options)
    seen: Counter[str] = Counter()
    per_stream, done = 40 // streams, 0
    for rounds in range(1, 7):
        of_two = 40 * rounds * repetitions
        batches = take(loader, streams * round(rounds * per_stream * (1 + repetitions)) - done)
        done += len(batches)
        seen.update(key for batch in batches for key in batch.sample_keys)
        two = [seen[f"{500 + i:06d}"] for i in range(40)]
        assert abs(sum(two) - of_two) <= streams
        assert abs(sum(seen.values()) - sum(two) - 40 * rounds) <= streams
        assert max(two) - min(two) <= 2
        resumed = open_loader(tmp_path / "blend.yaml", assets, shuffle=0, saved=[loader.state()], **options)
        loader.close()
        loader = resumed


def test_packs_keep_to_the_patches_of_the_tower(mixed: Path, assets: Assets) -> None:
    most = 2 * assets.plan.patches_per_tile
    options = {"packing": True, "seq_length": 256, "num_streams": 1, "micro_batch_size": 1}
    tiles = []
    for limit in (None, most):
        loader = open_loader(mixed / "crude", assets, max_media_tokens=limit, **options)
        tiles.append([len(batch.media["pixel_values"]) for batch in take(loader, 12)])
    assert max(tiles[0]) > 2 >= max(tiles[1]) and sum(tiles[1]) > 0
    with pytest.raises(ConfigError, match=f"max_media_tokens is 3, but the smallest image has {most // 2} patches"):
        open_loader(mixed / "crude", assets, max_media_tokens=3)


def test_a_picture_larger_than_a_sample_is_refused_at_once(mixed: Path, assets: Assets) -> None:
    number = assets.plan.tokens_per_tile
    open_loader(mixed / "crude", assets, seq_length=number + 1).close()
    with pytest.raises(ConfigError) as caught:
        open_loader(mixed / "crude", assets, seq_length=number, max_media_tokens=3)
    assert str(caught.value).splitlines()[1:] == [
        f"  - data.seq_length is {number}, but an image alone has at least {number} tokens: set --seq-length to more "
        "than that and the text",
        f"  - data.max_media_tokens is 3, but the smallest image has {assets.plan.patches_per_tile} patches of "
        "images and frames: raise or omit it",
    ]
