"""Where a run starts: from its own last checkpoint, from another one, or from random weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llava_mcore.checkpoint.complete import newest_complete
from llava_mcore.checkpoint.layout import TRACKER, hf_folder, latest_checkpoint
from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import ConfigError


@dataclass(frozen=True)
class StartPoint:
    """`checkpoint` is the folder of one iteration, or None for random weights.

    `hf_dir` is the folder whose config.json describes the model: a checkpoint carries its own.
    `passed_over`: newer checkpoints that were not used, each with the reason.
    """

    kind: Literal["resume", "load", "init"]
    checkpoint: Path | None
    iteration: int
    hf_dir: Path
    passed_over: tuple[str, ...] = ()


def start_point(run: RunConfig) -> StartPoint:
    """Return where a run starts.

    With `load_optim`, a checkpoint in the run's own folder comes before the load folder. Raises ConfigError if
    nothing says where to start or another run's checkpoints would be written over, CheckpointError if a
    checkpoint is not complete.
    """
    checkpoint = run.checkpoint
    own = run.run_dir if checkpoint.save_dir is not None else None
    choice = newest_complete(own) if own is not None else None
    if own is not None and choice is not None:
        if not checkpoint.load_optim:
            raise ConfigError(f"{own} already holds a checkpoint: resume it with --load-optim or choose another --name")
        return StartPoint("resume", choice.folder, choice.iteration, hf_folder(choice.folder), choice.passed_over)
    if checkpoint.load is not None:
        return _load(checkpoint.load)
    if not checkpoint.init:
        raise ConfigError("nothing to start from: give --megatron-load-dir, or --init for random weights")
    if checkpoint.load_optim:
        raise ConfigError(f"--load-optim has nothing to resume: {own} holds no checkpoint, and --init loads none")
    if checkpoint.hf_dir is None:
        raise ConfigError("--init needs the model's config: give its Hugging Face folder with --tokenizer-load-dir")
    return StartPoint("init", None, 0, checkpoint.hf_dir)


def _load(folder: Path) -> StartPoint:
    """Start from another folder. It must have a tracker: without one an import or a copy has not ended."""
    choice = newest_complete(folder) if (folder / TRACKER).exists() else None
    if choice is None:  # says what is missing
        checkpoint, iteration = latest_checkpoint(folder)
        return StartPoint("load", checkpoint, iteration, hf_folder(checkpoint))
    return StartPoint("load", choice.folder, choice.iteration, hf_folder(choice.folder), choice.passed_over)
