"""Validation inside a test world: real shards, a model with dropout."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from llava_mcore.checkpoint.layout import hf_folder, iteration_folder
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.data.loader.validation_data import ValidationData
from llava_mcore.parallel.groups import Groups
from llava_mcore.processes.watchdog import Watchdog
from llava_mcore.training.fetch import SkipBudget, fetch_step
from llava_mcore.training.step import train_step
from llava_mcore.training.validation import Validator
from tests.helpers.batches import FakeLoader
from tests.helpers.encoding import assets_once
from tests.helpers.shards import make_dataset
from tests.helpers.tiny_hf import make_hf_llava
from tests.parallel.checks import join
from tests.parallel.training_checks import GLOBAL_BATCH, curves_of, make_trainer, run_config

NUM_VALIDATION = 30
CHUNKED = {"parallel.num_layers_per_virtual_pipeline_stage": 1}
OPTIONS: dict[str, dict[str, Any]] = {
    "padded": {"data.packing": False},
    "packed": {"data.packing": True, "data.packing_buffer_size": 6},
    "some": {"validation.eval_iters": 2},
}


def make_material(root: Path, **text: Any) -> dict[str, str]:
    """Write a model with dropout, and data whose validation part has a broken sample."""
    make_hf_llava(root / "hf-dropout", text_overrides={"attention_dropout": 0.1} | text)
    import_hf(root / "hf-dropout", root / "dropout")
    answers: dict[int, dict[str, Any]] = {
        i: {"txt": "It is " + "so very " * (i % 7) + f"{i}."} for i in range(2 * NUM_VALIDATION)
    }
    # Number 16 of the validation part, which a choice of 15 or 16 of its 30 samples has too.
    answers[32]["jpg"] = b"no image"
    make_dataset(root / "data", num_samples=2 * NUM_VALIDATION, replace=answers)
    split = "split_parts: {train: [000001.tar], val: [000000.tar], test: []}\nexclude: []\n"
    (root / "data" / ".nv-meta" / "split.yaml").write_text(split)
    return {"checkpoint": str(root / "dropout"), "data": str(root / "data")}


def curves_and_validation(
    tp: int,
    pp: int,
    checkpoints: dict[str, str],
    save_dir: str,
    material: dict[str, str] | None,
    runs: Collection[str] | None = None,
    most_steps: int | None = None,
) -> dict[str, Any]:
    """Return the curves of one layout and, under "validation", what `validate` returns if it has `material`."""
    groups = join(tp, pp)
    found: dict[str, Any] = dict(curves_of(groups, checkpoints, save_dir, runs, most_steps))
    if material is not None:
        found["validation"] = validate(groups, save_dir=save_dir, **material)
    return found


def validate(groups: Groups, checkpoint: str, data: str, save_dir: str) -> dict[str, Any]:
    """Return what each kind of validation finds before training, and the losses of training with and without."""
    common = {"data.path": data, "data.num_workers": 0, "data.seq_length": 128, "validation.eval_interval": 1}
    options = OPTIONS | ({"interleaved": CHUNKED} if groups.pp_size > 1 else {})
    found: dict[str, Any] = {}
    for name, more in options.items():
        found[name] = train_and_validate(groups, checkpoint, save_dir, common | more, 2 if name == "padded" else 0)
    found["without"] = train_and_validate(groups, checkpoint, save_dir, {}, 2)
    return found


def train_and_validate(
    groups: Groups, checkpoint: str, save_dir: str, flags: dict[str, Any], steps: int
) -> dict[str, list[Any]]:
    """Validate, then train and validate in turns; train only, if the flags name no interval."""
    run = run_config(groups.tp_size, groups.pp_size, checkpoint, save_dir, **flags)
    trainer = make_trainer(groups, run)
    validates = run.validation.eval_interval is not None
    size = run.training.micro_batch_size
    loader, data = None, None
    if groups.loads_data:
        loader = FakeLoader(
            trainer.hf, micro_batch_size=size, dp_rank=groups.dp_rank, dp_size=groups.dp_size, text_only={1, 3}
        )
        if validates:
            assets = assets_once(hf_folder(iteration_folder(Path(checkpoint), 0)))
            iters = run.validation.eval_iters
            most = None if iters is None else iters * GLOBAL_BATCH
            data = ValidationData(run.data, assets, micro_batch_size=size, seed=1, most_samples=most)
    watchdog = Watchdog(100, Path(save_dir), groups.rank)
    validator = Validator(trainer, data, watchdog)
    losses, validations = [], []
    for iteration in range(steps + 1):
        if validates:
            result = validator.run(iteration)
            validations.append((result.loss, result.num_trained_tokens, result.num_conversations, result.num_skipped))
        if iteration < steps:
            batches, *_ = fetch_step(
                groups, loader, GLOBAL_BATCH // (size * groups.dp_size), SkipBudget(0.0), trainer.fields
            )
            step = train_step(
                groups, trainer.chunks, trainer.optimizer, trainer.scheduler, batches, GLOBAL_BATCH
            ).result()
            losses.append((step.loss, step.grad_norm))
    watchdog.close()
    return {"losses": losses, "validations": validations}
