"""What the ranks of a world do with inserted layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llava_mcore.training.saving.save import save_checkpoint
from llava_mcore.training.saving.state import TrainingProgress, resume
from tests.parallel.checks import join
from tests.parallel.resume_checks import STEPS, open_fake_loader, train_steps
from tests.parallel.training_checks import GLOBAL_BATCH, make_trainer, run_config


def train(tp: int, pp: int, checkpoint: str, save_dir: str, name: str, hf: str, **flags: Any) -> dict[str, Any]:
    """Train the inserted layers, save, train on; and resume."""
    groups = join(tp, pp)
    given: dict[str, Any] = {
        "name": name,
        "model.train_expanded": True,
        "model.freeze_vision_model": True,
        "parallel.use_distributed_optimizer": True,
        "parallel.sequence_parallel": tp > 1,
        "checkpoint.save": True,
        "checkpoint.save_optim": True,
        "training.micro_batch_size": 2,
        "optimizer.lr_warmup_fraction": 0.0,
    }
    run = run_config(tp, pp, checkpoint, save_dir, **given | flags)
    trainer = make_trainer(groups, run)
    loader = open_fake_loader(groups, trainer, run, 0)
    losses = train_steps(groups, trainer, run, loader)
    state = None if loader is None else loader.state()
    save_checkpoint(trainer, TrainingProgress(STEPS, STEPS * GLOBAL_BATCH), Path(hf), state)
    later = train_steps(groups, trainer, run, loader)
    again = make_trainer(groups, run_config(tp, pp, checkpoint, save_dir, **given | flags | _RESUMES))
    resume(again)
    resumed = train_steps(groups, again, run, open_fake_loader(groups, again, run, STEPS))
    return {"losses": losses + later, "resumed": resumed}


_RESUMES = {"checkpoint.load_optim": True}
