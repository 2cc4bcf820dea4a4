"""The validation split: which samples ranks read, and the message if there is no split."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from llava_mcore.config.load import load_run_config
from llava_mcore.config.rules.all_rules import check_values
from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.loader.validation_data import ValidationData, parts_of
from llava_mcore.data.storage.dataset_path import check_dataset
from llava_mcore.errors import DataError
from llava_mcore.parallel.batch import fill_rows, without_loss
from llava_mcore.training.logs.metrics_file import FILE, VALIDATION_FILE, JsonLinesWriter
from llava_mcore.training.logs.sinks import draw_losses
from llava_mcore.training.validation import ValidationResult
from tests.unit.data.test_data_shards import make_vqa

pytest_plugins = ("tests.helpers.llava_fixtures",)

SPLIT = "split_parts: {{train: [000000.tar], val: [{val}], test: []}}\nexclude: []\n"
SAMPLES = 25


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two datasets and a blend that validates on the validation split of one and all of the other."""
    root = tmp_path_factory.mktemp("data")
    for name, shards in (("one", 2), ("other", 1)):
        make_vqa(root / name, shards=shards, samples=SAMPLES)
    (root / "one" / ".nv-meta" / "split.yaml").write_text(SPLIT.format(val="000001.tar"))
    head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train: {path: ./one}\n"
    val = "  val: {blend: [{weight: 1, path: ./one}, {weight: 9, path: ./other, split_part: train}]}\n"
    (root / "blend.yaml").write_text(head + val)
    (root / "no-val.yaml").write_text(head)
    return root


def keys(path: Path, assets: Assets, dp_size: int, most: int | None = None, **options: Any) -> list[str]:
    """Return the sorted keys of the samples that all ranks read."""
    data = DataConfig(path=path, num_workers=0, seq_length=64, **options)
    part = ValidationData(data, assets, micro_batch_size=2, seed=1, most_samples=most)
    passes = [part.open(rank, dp_size, number) for rank in range(dp_size) for number in range(len(part.parts))]
    return sorted(key for one in passes for batch in one for key in batch.sample_keys)


@pytest.mark.parametrize("most", [1, 7, 24, 25])
def test_some_samples_are_spread_over_all(root: Path, assets: Assets, most: int) -> None:
    """The validation part may be sorted, so that its beginning is of one kind."""
    expected = sorted(f"{SAMPLES + i * SAMPLES // most:06d}" for i in range(most))
    assert sorted(keys(root / "one", assets, 1, most)) == expected


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("most", [None, 13])
def test_every_number_of_ranks_reads_the_same_samples_once(
    root: Path, assets: Assets, packing: bool, most: int | None
) -> None:
    whole = keys(root / "one", assets, 1, most, packing=packing, packing_buffer_size=4)
    assert len(set(whole)) == len(whole) == (most or SAMPLES)
    for dp_size in (2, 3, 5):
        assert keys(root / "one", assets, dp_size, most, packing=packing, packing_buffer_size=4) == whole


def test_a_blend_has_its_own_validation_split(root: Path, assets: Assets) -> None:
    found = keys(root / "blend.yaml", assets, 2)
    assert len(found) == 2 * SAMPLES, "each dataset once, whatever its weight"


def test_each_dataset_of_a_blend_is_a_part(root: Path, assets: Assets) -> None:
    data = DataConfig(path=root / "blend.yaml", num_workers=0, seq_length=64)
    for most in (None, 20):
        part = ValidationData(data, assets, micro_batch_size=2, seed=1, most_samples=most)
        assert list(part.parts) == [str(root / "one"), str(root / "other")]
        counts = [sum(len(batch.sample_keys) for batch in part.open(0, 1, number)) for number in (0, 1)]
        assert counts == [(most or 2 * SAMPLES) / 2] * 2
    assert parts_of([("a", 10), ("b", 1), ("a", 9)], 4) == {"a": range(0, 2), "b": range(2, 3), "a (2)": range(3, 4)}


def test_loader_processes_change_nothing(root: Path, assets: Assets) -> None:
    data = DataConfig(path=root / "one", num_workers=2, seq_length=64)
    part = ValidationData(data, assets, micro_batch_size=2, seed=1)
    for _ in range(2):  # every pass is the same
        found = sorted(key for batch in part.open(0, 1, 0) for key in batch.sample_keys)
        assert found == keys(root / "one", assets, 1)


def test_without_a_validation_split(root: Path) -> None:
    """Data without a validation part is refused with what to add."""
    for name, words in (("other", "has no shards in its 'val' part"), ("no-val.yaml", "has no 'val' section")):
        check_dataset(root / name)
        with pytest.raises(DataError, match=r"--val-ratio 0\.05, or a val section in a blend") as caught:
            check_dataset(root / name, "val")
        assert words in str(caught.value)
    run = load_run_config(None, ["validation.eval_iters=3"])
    assert any("--eval-iters has no effect without --eval-interval" in text for text in check_values(run))


def test_filled_and_blank_micro_batches_add_no_loss(root: Path, assets: Assets) -> None:
    data = DataConfig(path=root / "one", num_workers=0, seq_length=64)
    batches = list(ValidationData(data, assets, micro_batch_size=2, seed=1).open(0, 1, 0))
    short = next(batch for batch in batches if len(batch.input_ids) == 1)
    filled = fill_rows(short, 3)
    assert filled.input_ids.shape[0] == 3 and filled.loss_mask.sum() == short.loss_mask.sum() > 0
    assert torch.equal(filled.input_ids[:1], short.input_ids) and filled.media is short.media
    assert fill_rows(filled, 3) is filled
    blank = without_loss(short, assets.plan.fields)
    assert blank.loss_mask.shape == short.loss_mask.shape and not blank.loss_mask.any()
    assert not len(blank.media["pixel_values"]) and not len(blank.media["feature_positions"])
    assert torch.equal(blank.media["pixel_scale"], short.media["pixel_scale"])


def test_results_go_into_their_own_file_and_the_plot(tmp_path: Path) -> None:
    result = ValidationResult(2, 1.5, 4.48, 10, 4, 1, 0.5)
    assert "loss 1.5000 | perplexity 4.480" in result.line() and "1 samples skipped" in result.line()
    assert result.values() == {"validation/loss": 1.5, "validation/perplexity": 4.48, "validation/seconds": 0.5}
    blended = dataclasses.replace(result, losses={"/data/one": 1.25, "/data/two": 1.75})
    assert "loss 1.5000 (one 1.2500, two 1.7500) |" in blended.line()
    assert blended.values()["validation/loss/two"] == 1.75
    file = JsonLinesWriter(tmp_path / VALIDATION_FILE, keep_until=0)
    for iteration in (2, 4, 6):
        file.write(result.record() | {"iteration": iteration})
    JsonLinesWriter(tmp_path / VALIDATION_FILE, keep_until=4)
    lines = (tmp_path / VALIDATION_FILE).read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [2, 4]
    (tmp_path / FILE).write_text("".join(json.dumps({"iteration": i, "loss": 2.0}) + "\n" for i in range(1, 5)))
    with_validation = draw_losses(tmp_path)
    assert with_validation is not None
    drawn = Image.open(with_validation).tobytes()
    (tmp_path / VALIDATION_FILE).unlink()
    draw_losses(tmp_path)
    assert Image.open(with_validation).tobytes() != drawn
