"""--train-epochs: what an epoch is, when a run by epochs ends, and what the console says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llava_mcore import parallel  # noqa: F401  before megatron.core
from llava_mcore.config.load import load_run_config
from llava_mcore.config.rules.all_rules import check_values
from llava_mcore.config.rules.schedule import schedule_samples
from llava_mcore.config.schema import RunConfig
from llava_mcore.data.loader.datasets import samples_per_epoch
from llava_mcore.errors import ConfigError, DataError
from llava_mcore.launch.preflight import resolve, with_epochs
from llava_mcore.prepare.shard_plan import Counting, Options
from llava_mcore.training.logs.pace import Pace
from llava_mcore.training.saving.state import TrainingProgress
from tests.helpers.prepare_cases import make

pytest_plugins = ("tests.helpers.llava_fixtures",)


def run_of(*keys: str) -> RunConfig:
    return load_run_config(None, ["training.global_batch_size=4", "optimizer.lr=1", *keys])


def test_iterations_of_a_run_by_epochs() -> None:
    """19 batches of 4 have the last of 75 samples; with the ramp 25 samples are 2 of 2, 3 of 4, 2 of 8, not 6 of 4."""
    training = run_of("training.train_epochs=3", "training.epoch_samples=25").training
    assert (training.samples_to_read, training.num_iterations) == (75, 19)
    assert run_of("training.train_epochs=0.5", "training.epoch_samples=25").training.num_iterations == 4
    ramp = "training.rampup_batch_size=2,2,4"
    assert run_of("training.train_epochs=1", "training.epoch_samples=25", ramp).training.num_iterations == 2 + 6
    assert run_of("training.train_epochs=3").training.num_iterations == 0, "not counted yet"


def test_a_run_by_epochs_is_done_when_all_is_read() -> None:
    """Packs and skipped samples make it shorter; the upper limit of iterations ends it too."""
    training = run_of("training.train_epochs=3", "training.epoch_samples=25").training
    assert training.fraction_done(5, 74) < 1 <= training.fraction_done(5, 75)
    assert training.fraction_done(19, 70) == 1 and training.fraction_done(0, 0) == 0
    by_iterations = run_of("training.train_iters=10").training
    assert by_iterations.fraction_done(9, 10**6) == 0.9 and by_iterations.fraction_done(10, 0) == 1


def test_the_schedule_counts_the_samples_that_are_read() -> None:
    run = run_of("training.train_epochs=4", "training.epoch_samples=25", "optimizer.lr_warmup_fraction=0.1")
    assert schedule_samples(run.training, run.optimizer) == (10, 100, 0)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["training.train_epochs=2", "training.train_iters=3"], "--train-iters and --train-epochs both set the length"),
        (
            ["training.train_epochs=2", "optimizer.lr_decay_style=WSD", "optimizer.lr_wsd_decay_iters=2"],
            "give --lr-wsd-decay-samples",
        ),
    ],
)
def test_what_cannot_be(keys: list[str], expected: str) -> None:
    assert any(expected in problem for problem in check_values(run_of(*keys)))


def make_data(folder: Path, hf: Path, num_rows: int, *, pack_to: int | None = None, val_ratio: float = 0.0) -> Path:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(num_rows)))
    options = Options(rows_per_shard=5, val_ratio=val_ratio, counting=Counting(hf), pack_to=pack_to)
    make(folder / "rows.jsonl", folder / "out", options)
    return folder / "out"


def test_an_epoch_is_counted_in_conversations(hf: Path, tmp_path: Path) -> None:
    """Of the part that is trained on; of packs what is in them; of a blend as often as it repeats each."""
    single = make_data(tmp_path / "single", hf, 22, val_ratio=0.2)
    num_val = 22 - samples_per_epoch(single)
    assert num_val in (2, 5)
    packed = make_data(tmp_path / "packed", hf, 22, pack_to=100)
    totals = json.loads((packed / "manifest.json").read_text())["totals"]
    assert totals["entries"] < 22 == samples_per_epoch(packed)
    blend = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    "
    entries = "".join(f"      - {{repetitions: {times}, path: {packed}}}\n" for times in (3, 0.5))
    (tmp_path / "epochs.yaml").write_text(f"{blend}blend_epochized:\n{entries}")
    assert samples_per_epoch(tmp_path / "epochs.yaml") == 77
    (tmp_path / "weights.yaml").write_text(f"{blend}blend:\n      - {{weight: 1, path: {packed}}}\n")
    with pytest.raises(DataError, match=r"is a blend by weights, which has no epochs: give training.epoch_samples=N"):
        samples_per_epoch(tmp_path / "weights.yaml")
    manifest = json.loads((packed / "manifest.json").read_text())
    for shard in manifest["shards"]:
        del shard["conversations"]  # as earlier versions wrote it
    (packed / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="does not say how many conversations"):
        samples_per_epoch(packed)

    run = run_of("training.train_epochs=2", f"data.path={single}")
    assert with_epochs(run).training.samples_to_read == 2 * (22 - num_val)
    with pytest.raises(ConfigError, match=f"epoch_samples is 7, but an epoch of {single} has {22 - num_val}: omit it"):
        with_epochs(run_of("training.train_epochs=2", "training.epoch_samples=7", f"data.path={single}"))
    weighted = run_of("training.train_epochs=2", "training.epoch_samples=7", f"data.path={tmp_path / 'weights.yaml'}")
    assert with_epochs(weighted) == weighted


def test_the_console_shows_epochs_and_what_is_left() -> None:
    training = run_of("training.train_epochs=4", "training.epoch_samples=100").training
    pace = Pace(training, is_packed=True)
    progress = TrainingProgress(iteration=1, consumed_conversations=9, skipped_conversations=1)
    pace.add(progress, 60.0)
    assert pace.total(progress) == "~40 | epoch 0.10/4" and pace.rest(progress) == ""
    progress = TrainingProgress(iteration=2, consumed_conversations=20)
    pace.add(progress, 100.0)
    assert pace.total(progress) == "~40 | epoch 0.20/4" and pace.rest(progress) == " | 1:03:20 left"
    assert Pace(training, is_packed=False).total(progress) == "100 | epoch 0.20/4"
    by_iterations = Pace(run_of("training.train_iters=3").training, is_packed=True)
    for iteration in (1, 2):
        by_iterations.add(TrainingProgress(iteration=iteration), 2.0)
    assert by_iterations.total(progress) == "3" and by_iterations.rest(progress) == " | 0:00:02 left"
    assert by_iterations.rest(TrainingProgress(iteration=3)) == ""


def test_a_run_without_a_length_is_one_epoch() -> None:
    assert resolve(run_of(), 0)[0].training.train_epochs == 1
    for given in ("training.train_iters=5", "training.train_samples=64", "training.train_epochs=3"):
        assert resolve(run_of(given), 0)[0].training == run_of(given, "training.precision=fp32").training
