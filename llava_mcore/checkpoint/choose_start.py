"""Where a run starts: from its own last checkpoint, from another one, or from random weights."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from llava_mcore.checkpoint.complete import RUN_JSON, Choice, iterations, newest_complete
from llava_mcore.checkpoint.layout import RUN_FILE, TRACKER, hf_folder, latest_checkpoint, latest_iteration
from llava_mcore.config.load import load_run_config
from llava_mcore.config.schema import NON_PERSISTENT, RunConfig
from llava_mcore.config.sections.checkpoint import CheckpointConfig
from llava_mcore.errors import CheckpointError, ConfigError, problems
from llava_mcore.files.regular import naming, read_object, read_text

RUN_ID_FILE, RUN_ID = "run_id.txt", "run_id"
"""An id in SAVE_DIR/NAME, and its key in the run.json of checkpoints: a run must not resume from non-persistent
checkpoints of an earlier run of its name whose folder has been deleted. Older versions wrote none."""
_START_AGAIN = "; to start again, delete it or give another --name"


@dataclass(frozen=True)
class StartPoint:
    """`checkpoint` is the folder of one iteration, or None for random weights.

    `hf_dir` is the folder whose config.json describes the model: a checkpoint has its own.
    `passed_over`: newer checkpoints that were not used, with the reasons.
    """

    kind: Literal["resume", "load", "init"]
    checkpoint: Path | None
    iteration: int
    hf_dir: Path
    passed_over: tuple[str, ...] = ()


def start_point(
    run: RunConfig,
    unusable: Mapping[Path, str] = MappingProxyType({}),
    damaged: Mapping[Path, str] = MappingProxyType({}),
) -> StartPoint:
    """Return where a run starts.

    With `load_optim`, a checkpoint in the run's own folder comes before the load folder. Raises ConfigError if
    nothing says where to start or another run's checkpoints would be overwritten, CheckpointError if a
    checkpoint is not complete.

    Args:
        unusable: temporary checkpoints that cannot be used here, with their reasons.
        damaged: checkpoints whose files are damaged, with their reasons; they count as incomplete.
    """
    # The run's own checkpoints come first: they are resumed or, without --load-optim, not overwritten.
    checkpoint = run.checkpoint
    run_dir = run.run_dir if checkpoint.save_dir is not None else None
    choice = _own_choice(run, unusable, damaged) if run_dir is not None else None
    if run_dir is not None and choice is not None:
        if not checkpoint.load_optim:
            raise ConfigError(
                f"{run_dir} already holds a checkpoint: resume it with --load-optim or choose another --name"
            )
        return StartPoint("resume", choice.folder, choice.iteration, hf_folder(choice.folder), choice.passed_over)
    # Next comes a folder that the user names, then random weights.
    if checkpoint.load is not None:
        return _load(checkpoint.load, damaged)
    if not checkpoint.init:
        raise ConfigError("nothing to start from: give --megatron-load-dir, or --init for random weights")
    if checkpoint.load_optim:
        raise ConfigError(f"--load-optim has nothing to resume: {run_dir} has no checkpoint, and --init loads none")
    if checkpoint.hf_dir is None:
        raise ConfigError("--init needs the model's config: give its Hugging Face folder with --tokenizer-load-dir")
    return StartPoint("init", None, 0, checkpoint.hf_dir)


def resumes(run: RunConfig, start: StartPoint) -> bool:
    """Return whether to continue a run.

    The load folder is continued if it holds the optimizer of the same stage. Imported weights and those of an earlier
    stage start a new run, so the same command line works for the first start and every later one.
    """
    if start.kind == "resume":
        return True
    if start.kind != "load" or not run.checkpoint.load_optim or start.checkpoint is None:
        return False
    written_by = start.checkpoint / RUN_FILE
    before = load_run_config(written_by, [], {}) if written_by.is_file() else None
    return before is not None and before.checkpoint.save_optim and before.stage == run.stage


def unread_start(run: RunConfig, start: StartPoint) -> str | None:
    """Return a warning if the command names a start that the resumed run does not use; None if it is the run's own.

    Runs with adapters are not checked: the folder may say where their base model is now.
    """
    if start.kind != "resume" or start.checkpoint is None or run.adapter.is_on:
        return None
    before = load_run_config(start.checkpoint / RUN_FILE, [], {}).checkpoint
    began, named = _start_named(before), _start_named(run.checkpoint)
    if named in (None, began, f"--megatron-load-dir {run.run_dir.resolve()}"):
        return None
    return (
        f"this run resumes {start.checkpoint}, so {named} is not used: the run began with {began}. "
        "To start there, give another --name"
    )


def _start_named(checkpoint: CheckpointConfig) -> str | None:
    if checkpoint.load is not None:
        return f"--megatron-load-dir {checkpoint.load.resolve()}"
    return "--init" if checkpoint.init else None


def _own_choice(run: RunConfig, unusable: Mapping[Path, str], damaged: Mapping[Path, str]) -> Choice | None:
    """Return the newest complete checkpoint of the run, persistent or not."""
    # The usual case: no non-persistent checkpoints.
    if not iterations(run.non_persistent_dir):
        return newest_complete(run.run_dir, damaged, instead=_START_AGAIN)
    # The newest usable one of each folder, and why others are not used.
    choices: list[Choice] = []
    passed_over: list[str] = []
    is_damaged = False
    for root in (run.run_dir, run.non_persistent_dir):
        try:
            choice = newest_complete(root, damaged)
        except CheckpointError as error:
            passed_over.append(str(error))
            is_damaged = True
            continue
        if choice is None:
            continue
        passed_over += choice.passed_over
        problem = _not_of_this_course(run, choice)
        if choice.folder in unusable:
            passed_over.append(unusable[choice.folder])
        elif problem is not None:
            passed_over.append(f"{choice.folder}: {problem}")
        else:
            choices.append(choice)
    # A run whose checkpoints are all damaged must not start from the beginning.
    if not choices and is_damaged:
        raise CheckpointError(problems(f"{run.run_dir} has no complete checkpoint{_START_AGAIN}", passed_over))
    if not choices:
        return None
    newest = max(choices, key=lambda choice: choice.iteration)  # in a tie the first, which is persistent
    return Choice(newest.folder, newest.iteration, tuple(passed_over))


def _not_of_this_course(run: RunConfig, choice: Choice) -> str | None:
    """Return why a checkpoint cannot be resumed: it belongs to another run, or this run was set back to an earlier one.
    None if it can."""
    if choice.folder.parent not in (run.run_dir, run.run_dir / NON_PERSISTENT):
        written = read_object(choice.folder / RUN_JSON, CheckpointError)
        try:
            save_dir = written["run"]["checkpoint"]["save_dir"]
        except (KeyError, TypeError) as error:
            return f"{RUN_JSON} does not say which run wrote it ({error!r})"
        if save_dir != str(run.checkpoint.save_dir):
            return f"belongs to another run of this name, under {save_dir}"
        if RUN_ID in written and written[RUN_ID] != run_id(run.run_dir):
            return f"belongs to an earlier run of this name, whose folder {run.run_dir} has been deleted"
    try:
        limit = latest_iteration(run.run_dir)
    except CheckpointError:
        return None
    if limit is not None and limit < max(iterations(run.run_dir), default=0) and choice.iteration > limit:
        return f"newer than iteration {limit}, which {run.run_dir / TRACKER} names although there are newer ones"
    return None


def _load(folder: Path, damaged: Mapping[Path, str]) -> StartPoint:
    """Start from another folder. It must have a tracker: without one, an import or a copy is incomplete."""
    choice = newest_complete(folder, damaged) if (folder / TRACKER).exists() else None
    if choice is None:  # raises and says what is missing
        checkpoint, iteration = latest_checkpoint(folder)
        return StartPoint("load", checkpoint, iteration, hf_folder(checkpoint))
    return StartPoint("load", choice.folder, choice.iteration, hf_folder(choice.folder), choice.passed_over)


def run_id(run_dir: Path) -> str | None:
    """Return the id of a run's folder; None before its first checkpoint. FileError for a file that is not text."""
    file = run_dir / RUN_ID_FILE
    return read_text(file).strip() if file.is_file() else None


def ensure_run_id(run_dir: Path) -> str:
    """Return the id of a run's folder, and write one if it has none."""
    identity = run_id(run_dir)
    if identity is None:
        identity = uuid.uuid4().hex
        run_dir.mkdir(parents=True, exist_ok=True)
        with naming(run_dir / RUN_ID_FILE):
            (run_dir / RUN_ID_FILE).write_text(f"{identity}\n", encoding="utf-8")
    return identity
