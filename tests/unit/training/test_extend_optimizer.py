"""docs/extend/optimizer.md, followed literally: SGD out of tree, trained, saved and loaded, against torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field, create_model

from llava_mcore import parallel  # noqa: F401  isort: skip  before megatron.core
from megatron.core.optimizer import SGD

from llava_mcore.checkpoint.dist import load_state, load_weights, model_state, save_state
from llava_mcore.config.schema import RunConfig
from llava_mcore.config.sections.optimizer import OptimizerConfig
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.errors import ConfigError
from llava_mcore.parallel.groups import Groups, single_process
from llava_mcore.training.fetch import SkipBudget, fetch_step
from llava_mcore.training.optimization.optimizer_state import load_optimizer_state, optimizer_state
from llava_mcore.training.optimization.optimizers import OPTIMIZERS, OptimizerKind
from llava_mcore.training.setup import Trainer
from llava_mcore.training.step import train_step
from tests.helpers.batches import FakeLoader
from tests.helpers.pages import blocks
from tests.helpers.tiny_hf import make_hf_llava
from tests.parallel.training_checks import GLOBAL_BATCH, make_trainer, run_config

LR, MOMENTUM = 0.05, 0.8


def train(groups: Groups, trainer: Trainer, loader: FakeLoader, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        batches, *_ = fetch_step(groups, loader, 2, SkipBudget(0.0), trainer.fields)
        parts = trainer.chunks, trainer.optimizer, trainer.scheduler
        losses.append(train_step(groups, *parts, batches, GLOBAL_BATCH).result().loss)
    return losses


def state_of(trainer: Trainer, groups: Groups, *, is_loading: bool) -> dict[str, Any]:
    """The weights to save, and the optimizer's state to save or to load into."""
    model = model_state(trainer.models, is_loading=is_loading)
    optimizer = optimizer_state(trainer.optimizer, model, groups, is_loading=is_loading)
    return ({} if is_loading else model) | {"optimizer": optimizer}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_page(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer of docs/extend/optimizer.md works as its blocks stand."""
    settings, line = blocks("optimizer.md")
    names = settings.run({"Field": Field, "Literal": Literal})
    types = {
        name: (eval(kind, {"Literal": Literal}), names[name])  # as the page writes them
        for name, kind in names["__annotations__"].items()
    }
    section: Any = create_model("WithSgd", __base__=OptimizerConfig, **types)
    monkeypatch.setitem(OPTIMIZERS, "sgd", None)
    line.run({"OPTIMIZERS": OPTIMIZERS, "OptimizerKind": OptimizerKind, "SGD": SGD})
    make_hf_llava(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "megatron")

    def sgd_run(**flags: Any) -> RunConfig:
        given = {"optimizer.lr": LR, "optimizer.lr_warmup_fraction": 0.0, "optimizer.lr_decay_style": "constant"}
        run = run_config(1, 1, str(tmp_path / "megatron"), str(tmp_path / "save"), **given | flags)
        values = run.optimizer.model_dump() | {"name": "sgd", "sgd_momentum": MOMENTUM}
        return run.model_copy(update={"optimizer": section(**values)})

    with single_process() as groups:
        run = sgd_run(**{"training.precision": precision})
        first = make_trainer(groups, run)
        assert type(first.optimizer.chained_optimizers[0].optimizer) is SGD
        loader = FakeLoader(first.hf, micro_batch_size=4, dp_rank=0, dp_size=1, text_only={1, 3})
        train(groups, first, loader, 2)
        (tmp_path / "saved").mkdir()
        save_state(state_of(first, groups, is_loading=False), tmp_path / "saved")
        position = loader.state()
        uninterrupted = train(groups, first, loader, 2)

        again = make_trainer(groups, run)
        load_weights(again.models, tmp_path / "saved")
        loaded = load_state(state_of(again, groups, is_loading=True), tmp_path / "saved")
        load_optimizer_state(again.optimizer, loaded["optimizer"])
        loader.restore(position)
        assert train(groups, again, loader, 2) == uninterrupted, "with its momentum"
        with pytest.raises(ConfigError, match="does not distribute sgd"):
            make_trainer(groups, sgd_run(**{"parallel.use_distributed_optimizer": True}))
