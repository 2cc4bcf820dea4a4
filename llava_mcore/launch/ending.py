"""Last lines of a run on the console: where its results are, or how it continues."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import LlavaMcoreError
from llava_mcore.processes.control import ENDING, STOPPED_EARLY


def last_lines(run: RunConfig, code: int, *, first_node: bool = True) -> list[str]:
    """Return the lines for a run that has ended.

    Args:
        code: exit code of its workers. Errors have messages of their own.
        first_node: whether this is the node that prints what is the same for all.
    """
    if code == 0:
        return [*_results(run)] if first_node else []
    lines = [_continuation(run)] if first_node and (code == STOPPED_EARLY or code > 128) else []
    if code - 128 in ENDING:
        return ["; ".join([f"ended by {signal.Signals(code - 128).name}", *lines])]
    return lines


def _results(run: RunConfig) -> Iterator[str]:
    from llava_mcore.training.logs.sinks import PLOT

    folders = {"losses": run.run_dir / PLOT, "TensorBoard's files": run.run_dir / "tensorboard"}
    for name, path in folders.items():
        if path.exists() and (name == "losses" or run.logging.tensorboard):
            yield f"{name}: {path}"
    checkpoint = _newest(run) if run.checkpoint.saves else None
    if checkpoint is not None:
        yield f"checkpoint: {checkpoint}"
        result = "PEFT adapter (--merge: a whole model)" if run.adapter.is_on else "Hugging Face folder"
        yield f"as a {result}: python -m llava_mcore export-hf --megatron-dir {run.run_dir} --hf-dir FOLDER"


def _continuation(run: RunConfig) -> str:
    checkpoint = _newest(run)
    if checkpoint is None:
        return "no checkpoint was saved: the same command starts again"
    iteration = int(checkpoint.name.removeprefix("iter_"))
    if not run.checkpoint.save_optim:
        return f"iteration {iteration} was saved without --save-optim: its weights can be loaded, but not resumed"
    command = "the same command" if run.checkpoint.load_optim else "the same command with --load-optim"
    return f"{command} resumes at iteration {iteration}"


def _newest(run: RunConfig) -> Path | None:
    """Return the run's own checkpoint from which it would resume; None if it has none that is complete."""
    from llava_mcore.checkpoint.choose_start import start_point

    resuming = run.checkpoint.model_copy(update={"load_optim": True})
    try:
        start = start_point(run.model_copy(update={"checkpoint": resuming}))
    except (LlavaMcoreError, OSError):
        return None
    return start.checkpoint if start.kind == "resume" else None
