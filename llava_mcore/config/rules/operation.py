"""Rules for the options of saving, profiling and reporting."""

from __future__ import annotations

from collections.abc import Iterator

from llava_mcore.config.rules.schedule import check_schedule
from llava_mcore.config.schema import RunConfig
from llava_mcore.config.sections.logs import parse_numbers, parse_span


def check_operations(run: RunConfig, world_size: int) -> Iterator[str]:
    """Yield options that cannot work together. For those without an effect see `needs`."""
    yield from _check_profile(run, world_size)
    yield from _check_memory_snapshot(run, world_size)
    yield from _check_saving(run)


def _check_profile(run: RunConfig, world_size: int) -> Iterator[str]:
    span, ranks = parse_span(run.logging.profile), parse_numbers(run.logging.profile_ranks)
    has_an_end = not list(check_schedule(run.training, run.optimizer))  # otherwise another rule reports it
    if span and has_an_end and span[-1] > (last := run.training.num_iterations):
        yield f"--profile {run.logging.profile} reaches beyond the last iteration, {last}: change it, or train longer"
    if ranks and ranks[-1] >= world_size:
        yield f"logging.profile_ranks names rank {ranks[-1]}: this run has 0 to {world_size - 1}"


def _check_memory_snapshot(run: RunConfig, world_size: int) -> Iterator[str]:
    iteration, ranks = run.logging.memory_snapshot, parse_numbers(run.logging.memory_snapshot_ranks)
    if iteration is None:
        return
    if not list(check_schedule(run.training, run.optimizer)) and iteration > (last := run.training.num_iterations):
        yield f"--memory-snapshot {iteration} is after the last iteration, {last}: change it, or train longer"
    if iteration in parse_span(run.logging.profile):
        yield (
            f"--memory-snapshot {iteration}: --profile {run.logging.profile} records the memory of that iteration too: "
            "choose another one"
        )
    if ranks and ranks[-1] >= world_size:
        yield f"logging.memory_snapshot_ranks names rank {ranks[-1]}: this run has 0 to {world_size - 1}"


def _check_saving(run: RunConfig) -> Iterator[str]:
    checkpoint = run.checkpoint
    if checkpoint.non_persistent_save_interval is not None and not checkpoint.save_optim:
        yield (
            "--non-persistent-save-interval writes checkpoints to resume from: add --save-optim, and --save or "
            "--save-interval for persistent ones"
        )
