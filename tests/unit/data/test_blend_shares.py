"""Weights of a blend: by samples or tokens, over time, and how often a dataset may be read."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from llava_mcore.config.rules.batch_size import BatchSizes
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.loader.datasets import samples_per_epoch
from llava_mcore.data.loader.train_loader import TrainLoader
from llava_mcore.errors import DataError
from tests.unit.data.test_data_loader import assert_equal, open_loader, take
from tests.unit.data.test_data_shards import prepare, vqa_sample, write_shard

pytest_plugins = ("tests.helpers.llava_fixtures",)

OPTIONS: dict[str, Any] = {"num_streams": 4, "micro_batch_size": 1, "shuffle": 10}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two datasets: 40 samples with keys below 500, and 20 others."""
    root = tmp_path_factory.mktemp("data")
    for name, first, count in (("one", 0, 40), ("two", 500, 20)):
        write_shard(root / name / "000000.tar", [vqa_sample(first + i) for i in range(count)])
        prepare(root / name)
    return root


def blend(root: Path, *entries: dict[str, Any]) -> Path:
    """Write a blend of the two datasets."""
    listed = [{"weight": 1, "path": f"./{name}"} | entry for name, entry in zip(("one", "two"), entries, strict=True)]
    content = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": {"blend": listed}}}
    file = root / "blend.yaml"
    file.write_text(json.dumps(content))
    return file


def share_of_two(loader: TrainLoader, num_batches: int) -> float:
    """Return the share of the second dataset in the next batches."""
    keys = [key for batch in take(loader, num_batches) for key in batch.sample_keys]
    return sum(int(key) >= 500 for key in keys) / len(keys)


def test_weights_change_over_iterations(root: Path, assets: Assets) -> None:
    """From none of the second dataset to as much as of the first one in 50 iterations of 4 micro-batches."""
    path = blend(root, {}, {"subflavors": {"weight_factor": {"iterations": [[0, 0], [50, 1]]}}})
    options = OPTIONS | {"num_micro_batches": 4}
    loader = open_loader(path, assets, **options)
    shares = [share_of_two(loader, 40) for _ in range(5)]
    state, later = loader.state(), share_of_two(loader, 80)
    assert shares == sorted(shares) and shares[0] < 0.12 and 0.35 < shares[-1] <= 0.5
    assert later == pytest.approx(0.5, abs=0.03)
    assert share_of_two(open_loader(path, assets, saved=[state], **options), 80) == later


def test_the_first_batches_of_all_streams_are_not_at_the_start(root: Path, assets: Assets) -> None:
    """Many streams and few micro-batches: the weight changes at its iteration, before every stream has had a turn."""
    path = blend(root, {}, {"subflavors": {"weight_factor": {"iterations": [[0, 0], [2.9, 0], [3, 3]]}}})
    loader = open_loader(path, assets, **OPTIONS | {"num_streams": 48, "num_micro_batches": 4})
    assert share_of_two(loader, 12) == 0
    assert share_of_two(loader, 36) == pytest.approx(0.75, abs=0.2)


def test_iterations_are_those_of_the_run(root: Path, assets: Assets) -> None:
    """Ten iterations of one micro-batch, then of four; resumed with iterations of another size, it is where it was."""
    path = blend(root, {}, {"subflavors": {"weight_factor": {"iterations": [[0, 0], [18.3, 0], [18.4, 1]]}}})
    options = OPTIONS | {"num_micro_batches": 4}
    ramp = open_loader(path, assets, batch_sizes=BatchSizes(((0, 1), (10, 4))), **options)
    assert share_of_two(ramp, 40) == 0  # 10 + 7.5 iterations
    state = ramp.state()
    assert share_of_two(ramp, 4) == 0 and share_of_two(ramp, 36) > 0.4
    without = open_loader(path, assets, **options)
    assert share_of_two(without, 74) == 0 and share_of_two(without, 40) > 0.4
    for num_micro_batches in (1, 8):
        other = open_loader(path, assets, saved=[state], **(OPTIONS | {"num_micro_batches": num_micro_batches}))
        assert share_of_two(other, 4) == 0 and share_of_two(other, 100) > 0.3
    with pytest.raises(DataError, match=r"data.blend_weights: saved with samples, now tokens"):
        open_loader(path, assets, saved=[state], blend_weights="tokens", **options)


def test_weights_change_over_tokens(root: Path, assets: Assets) -> None:
    path = blend(root, {}, {"subflavors": {"weight_factor": {"tokens": [[0, 0], [1000, 0], [1001, 1]]}}})
    loader = open_loader(path, assets, **OPTIONS)
    tokens = 0
    while tokens < 900:
        batch = next(loader)
        assert all(int(key) < 500 for key in batch.sample_keys)
        tokens += batch.num_tokens
    take(loader, 16)
    resumed = open_loader(path, assets, saved=[loader.state()], **OPTIONS)
    assert share_of_two(loader, 40) == pytest.approx(0.5, abs=0.1)
    assert share_of_two(resumed, 40) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("packing", [False, True])
def test_a_batch_says_which_dataset_a_token_belongs_to(root: Path, assets: Assets, packing: bool) -> None:
    options = OPTIONS | {"packing": packing, "seq_length": 192}
    loader = open_loader(blend(root, {}, {}), assets, **options)
    assert loader.dataset_names == ["one", "two"]
    for batch in take(loader, 20):
        ids = batch.dataset_ids
        assert ids.shape == batch.input_ids.shape
        starts = [(0, int(start)) for start in batch.cu_seqlens] if packing else [(row, 0) for row in range(len(ids))]
        for key, place in zip(batch.sample_keys, starts, strict=False):
            assert ids[place] == (int(key) >= 500)
    single = open_loader(root / "one", assets, **options)
    assert single.dataset_names == [] and not next(single).dataset_ids.numel()


def test_a_dataset_is_left_out_after_its_epochs(root: Path, assets: Assets) -> None:
    path = blend(root, {"weight": 3}, {"weight": 3, "subflavors": {"max_epochs": 2}})
    loader = open_loader(path, assets, **OPTIONS)
    counts = Counter(key for batch in take(loader, 300) for key in batch.sample_keys)
    assert {key: count for key, count in counts.items() if int(key) >= 500} == {f"{500 + i:06d}": 2 for i in range(20)}
    both = {"subflavors": {"max_epochs": 1}}
    ending = open_loader(blend(root, both, both), assets, **OPTIONS)
    assert len(take(ending, 60)) == 60
    with pytest.raises(DataError, match=r"the data ended, since every dataset .* max_epochs"):
        next(ending)
    epochized = path.read_text().replace('"blend"', '"blend_epochized"').replace('"weight": 1', '"repetitions": 1')
    path.write_text(epochized)
    with pytest.raises(
        DataError, match=r"no epochs of one length: max_epochs leaves .*one, .*two out .*epoch_samples=N"
    ):
        samples_per_epoch(path)


def test_weights_of_tokens(root: Path, assets: Assets) -> None:
    """With samples of the second dataset twice as long, as `prepare` has counted, half as many of them are read."""
    for name, entries, total in (("one", 40, 40 * 30), ("two", 20, 20 * 60)):
        totals = {"entries": entries, "conversations": entries, "tokens": {"total": total}}
        (root / name / "manifest.json").write_text(json.dumps({"totals": totals}))
    path = blend(root, {}, {})
    assert share_of_two(open_loader(path, assets, **OPTIONS), 120) == pytest.approx(1 / 2, abs=0.03)
    loader = open_loader(path, assets, blend_weights="tokens", **OPTIONS)
    assert share_of_two(loader, 120) == pytest.approx(1 / 3, abs=0.03)
    (root / "two" / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"two/manifest.json cannot be read .*blend_weights=samples"):
        open_loader(path, assets, blend_weights="tokens", **OPTIONS)


def test_a_dataset_of_weight_0_is_named(root: Path, assets: Assets, caplog: pytest.LogCaptureFixture) -> None:
    open_loader(blend(root, {}, {"weight": 0}), assets, **OPTIONS)
    assert "two: no sample of it is read, since its weight in the blend is 0" in caplog.text
    assert "one: no sample" not in caplog.text


def test_wrong_weights_are_named_together(root: Path, assets: Assets) -> None:
    path = blend(root, {"subflavors": {"max_epochs": "three"}}, {"subflavors": {"weight_factor": {"steps": [[0, 1]]}}})
    with pytest.raises(DataError) as error:
        open_loader(path, assets, **OPTIONS)
    assert "max_epochs must be a number, found 'three'" in str(error.value)
    assert "weight_factor must be {iterations: [[0, 1.0], [5000, 0.2]]}" in str(error.value)
    with pytest.raises(DataError, match="max_epochs must be more than 0"):
        open_loader(blend(root, {"subflavors": {"max_epochs": 0}}, {}), assets, **OPTIONS)
    with pytest.raises(DataError, match="all weights are 0"):
        zero = {"subflavors": {"weight_factor": {"iterations": [[0, 0]]}}}
        open_loader(blend(root, zero, zero), assets, **OPTIONS)


def test_sorted_data_comes_mixed(assets: Assets, tmp_path: Path) -> None:
    """Short samples first, long ones after: packs have both, and every sample is seen as often as any other."""
    long = {"question": "Which digit is in this image? " * 4}
    samples = [vqa_sample(i, **({} if i < 80 else {"json": long})) for i in range(160)]
    write_shard(tmp_path / "000000.tar", samples)
    prepare(tmp_path)
    options = OPTIONS | {"packing": True, "packing_buffer_size": 8, "seq_length": 192, "shuffle": 1000}
    loader = open_loader(tmp_path, assets, **options)
    counts: Counter[str] = Counter()
    kinds = []
    while sum(counts.values()) < 5 * 160:
        keys = next(loader).sample_keys
        counts.update(keys)
        kinds.append({int(key) < 80 for key in keys})
    assert max(counts.values()) - min(counts.values()) <= 3 and len(counts) == 160
    assert sum(len(kind) == 2 for kind in kinds) > len(kinds) / 2
    again = open_loader(tmp_path, assets, **options)
    assert_equal(take(again, 5), take(open_loader(tmp_path, assets, workers=2, **options), 5))
