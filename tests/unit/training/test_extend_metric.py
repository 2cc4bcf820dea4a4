"""docs/extend/metric.md, followed literally: one metric of each kind, out of tree, through a run's loop and log."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from llava_mcore.checkpoint.layout import hf_folder, iteration_folder
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.data.loader.collate import BATCH_SUMS
from llava_mcore.data.loader.train_loader import TrainLoader
from llava_mcore.models.loss.terms import ChunkLogits
from llava_mcore.parallel.groups import single_process
from llava_mcore.parallel.named_sums import add_sum
from llava_mcore.training.iterations import Iterations
from llava_mcore.training.logs.metrics_file import DEVICE_SUMS, Metrics
from llava_mcore.training.logs.reporter import HOST_METRICS, Reporter, StartTimes
from llava_mcore.training.loss_terms import LOSS_TERMS, KnownTerm
from llava_mcore.training.optimization.optimizer import learning_rates
from llava_mcore.training.saving.state import TrainingProgress
from llava_mcore.training.step import train_step
from tests.helpers.pages import blocks
from tests.helpers.shards import make_dataset
from tests.helpers.tiny_hf import make_hf_llava
from tests.parallel.training_checks import make_trainer, run_config

STEPS = 2
ADDED = ["images_per_sample", "feature_size", "log_sum", "samples_per_second"]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the blocks of the page change, put back at the end."""
    found: dict[str, Any] = {
        "HOST_METRICS": dict(HOST_METRICS),
        "BATCH_SUMS": dict(BATCH_SUMS),
        "LOSS_TERMS": dict(LOSS_TERMS),
    }
    for name, table in (("HOST_METRICS", HOST_METRICS), ("BATCH_SUMS", BATCH_SUMS), ("LOSS_TERMS", LOSS_TERMS)):
        for key in ADDED:
            monkeypatch.setitem(table, key, None)
            del table[key]
        found[name] = table
    monkeypatch.setattr("llava_mcore.training.logs.metrics_file.DEVICE_SUMS", DEVICE_SUMS)
    return found | {"DEVICE_SUMS": DEVICE_SUMS, "ChunkLogits": ChunkLogits, "Tensor": Tensor, "KnownTerm": KnownTerm}


def test_the_page(tmp_path: Path, tables: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """The metrics of docs/extend/metric.md work as their blocks stand."""
    host, loader, logits, model, name = blocks("metric.md")
    make_hf_llava(tmp_path / "hf")
    checkpoint = import_hf(tmp_path / "hf", tmp_path / "megatron")
    make_dataset(tmp_path / "data", num_samples=20)
    for block in (host, loader, logits, name):
        block.run(tables)
    caplog.set_level(logging.INFO)
    try:
        with single_process() as groups:
            flags = {"data.path": str(tmp_path / "data"), "data.num_workers": 0, "data.seq_length": 128}
            run = run_config(1, 1, str(tmp_path / "megatron"), str(tmp_path / "save"), **flags)
            run.run_dir.mkdir(parents=True)
            trainer, progress = make_trainer(groups, run), TrainingProgress()
            trainer.models[0].vision_projection.register_forward_hook(
                lambda module, inputs, output: model.run({"add_sum": add_sum, "features": output}) and None
            )
            assets = load_assets(hf_folder(iteration_folder(tmp_path / "megatron", 0)))
            data = TrainLoader(run.data, assets, micro_batch_size=4, dp_rank=0, dp_size=1, seed=1)
            iterations = Iterations(trainer, data, progress, Reporter(trainer, progress, StartTimes()))
            for _ in range(STEPS):
                fetched, rates = iterations.fetch([]), learning_rates(run, trainer.scheduler)
                parts = (trainer.groups, trainer.chunks, trainer.optimizer, trainer.scheduler)
                iterations.launched(fetched, train_step(*parts, fetched.batches, iterations.size), rates)
            iterations.report_pending()
            data.close()
    finally:
        DEVICE_SUMS.remove("feature_size")
    assert checkpoint.is_dir()
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == STEPS
    for line in lines:
        assert [*line][-len(ADDED) :] == ADDED, "after the keys that every run has"
        assert line["images_per_sample"] == 1 and line["num_truncated"] == 0
        assert line["feature_size"] > 0 and line["samples_per_second"] > 0
        assert line["log_sum"] > line["loss"] > 0 or line["log_sum"] > 0
    assert [*lines[0]][: -len(ADDED)] == [name for name in Metrics.__dataclass_fields__ if name != "sums"]
    assert f"| log_sum {lines[-1]['log_sum']:.4g}" in caplog.text
