"""Configuration of logs and metrics."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from llava_mcore.config.sections.base import Flag, Iterations, Needs, Section


def parse_span(text: str | None) -> range:
    """Return the iterations that `START:END` names, both included; empty for None. ValueError for anything else."""
    if text is None:
        return range(0)
    match = re.fullmatch(r"(\d{1,10}):(\d{1,10})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError("expected the first and the last iteration, such as 10:12")
    return range(int(match[1]), int(match[2]) + 1)


def parse_numbers(text: str | None) -> tuple[int, ...]:
    """Return the numbers of `0,3`, sorted; empty for None. ValueError for anything else."""
    parts = text.split(",") if text is not None else []
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError("expected numbers separated by commas, such as 0,3")
    return tuple(sorted({int(part) for part in parts}))


def _span_text(text: str) -> str:
    parse_span(text)
    return text


def _numbers_text(text: str) -> str:
    parse_numbers(text)
    return text


Span = Annotated[str, AfterValidator(_span_text)]
Ranks = Annotated[str, AfterValidator(_numbers_text)]


class LoggingConfig(Section):
    """Logs and metrics."""

    flag_group = "logging"

    log_interval: Annotated[Iterations, Flag("--log-interval")] = 1
    """Iterations between console lines; metrics.jsonl gets every iteration."""
    tensorboard: Annotated[bool, Flag("--tensorboard")] = False
    """Also write TensorBoard's event files, in SAVE_DIR/NAME/tensorboard."""
    wandb: Annotated[bool, Flag("--wandb")] = False
    """Also log to Weights & Biases; a resumed run continues the same one. WANDB_MODE=offline needs no network."""
    wandb_project: Annotated[str, Needs("logging.wandb")] = "llava_mcore"
    """Weights & Biases project of the run."""
    mlflow: Annotated[bool, Flag("--mlflow")] = False
    """Also log to MLflow, to the server that MLFLOW_TRACKING_URI names, else into SAVE_DIR/NAME/mlruns; a resumed run
    continues the same one."""
    mlflow_experiment: Annotated[str, Needs("logging.mlflow")] = "llava_mcore"
    """MLflow experiment of the run."""
    debug: Annotated[bool, Flag("--debug")] = False
    """Print the first batch as text, with the trained parts marked, and the input and output shapes of each module on
    every pipeline stage."""
    profile: Annotated[Span | None, Flag("--profile")] = None
    """Iterations START:END (both included) in which every rank writes a torch profile, and on a GPU a memory snapshot,
    to SAVE_DIR/NAME/profile."""
    profile_ranks: Annotated[Ranks | None, Needs("logging.profile")] = None
    """Ranks that write a profile, such as 0,8. Default: all."""
    memory_snapshot: Annotated[Iterations | None, Flag("--memory-snapshot")] = None
    """Iteration in which every rank records its GPU's memory: a snapshot for pytorch.org/memory_viz, and an image of
    the memory over time by category. Both go to SAVE_DIR/NAME/memory."""
    memory_snapshot_ranks: Annotated[Ranks | None, Needs("logging.memory_snapshot")] = None
    """Ranks that record their memory, such as 0,8. Default: all."""
