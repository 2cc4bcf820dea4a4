"""docs/extend/loss.md, followed literally: a z-loss is added out of tree and trained with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field, create_model
from torch import Tensor

from llava_mcore.config.schema import RunConfig
from llava_mcore.config.sections.training import TrainingConfig
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.models.loss.terms import ChunkLogits
from llava_mcore.parallel.groups import Groups, single_process
from llava_mcore.training.fetch import SkipBudget, fetch_step
from llava_mcore.training.loss_terms import LOSS_TERMS, KnownTerm
from llava_mcore.training.step import StepResult, train_step
from tests.helpers.batches import FakeLoader
from tests.helpers.pages import blocks
from tests.helpers.tiny_hf import make_hf_llava
from tests.parallel.training_checks import GLOBAL_BATCH, make_trainer, run_config


def step(groups: Groups, run: RunConfig) -> StepResult:
    trainer = make_trainer(groups, run)
    loader = FakeLoader(trainer.hf, micro_batch_size=4, dp_rank=0, dp_size=1, text_only={1, 3})
    batches, *_ = fetch_step(groups, loader, 2, SkipBudget(0.0), trainer.fields)
    return train_step(groups, trainer.chunks, trainer.optimizer, trainer.scheduler, batches, GLOBAL_BATCH).result()


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss term of docs/extend/loss.md works as its blocks stand."""
    key, term, _ = blocks("loss.md")
    make_hf_llava(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "megatron")
    names = key.run({"Field": Field})
    types = {
        name: (getattr(sys.modules["builtins"], kind), names[name]) for name, kind in names["__annotations__"].items()
    }
    section: Any = create_model("WithTerm", __base__=TrainingConfig, **types)
    monkeypatch.setitem(LOSS_TERMS, "z_loss", None)  # put back at the end
    term.run({"ChunkLogits": ChunkLogits, "Tensor": Tensor, "KnownTerm": KnownTerm, "LOSS_TERMS": LOSS_TERMS})

    def run_with(**values: float) -> RunConfig:
        run = run_config(1, 1, str(tmp_path / "megatron"), str(tmp_path / "save"))
        return run.model_copy(update={"training": section(**run.training.model_dump(), **values)})

    with single_process() as groups:
        without, with_term = step(groups, run_with()), step(groups, run_with(z_loss=0.1))
    assert not without.sums and with_term.sums.keys() == {"z_loss"}
    assert with_term.loss == without.loss, "the cross-entropy alone"
    assert with_term.grad_norm != pytest.approx(without.grad_norm, rel=1e-2)
    total, count = with_term.sums["z_loss"]
    assert count == with_term.num_trained_tokens and total / count > 1
