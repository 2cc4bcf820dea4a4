"""The pipeline's schedule: a simulation of every pass, and the closed formula that a search uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Span:
    """A pass of a chunk of a stage for one micro-batch, with its begin and end in seconds."""

    stage: int
    chunk: int
    micro_batch: int
    kind: Literal["forward", "backward"]
    begin: float
    end: float


def order(stage: int, pp: int, micro_batches: int, virtual: int = 1) -> Iterator[tuple[str, int, int]]:
    """Yield (kind, chunk, micro-batch) of a stage in megatron-core's order: warm-up, one of each in turns, the rest.

    Interleaved, groups of pp micro-batches go through all chunks before the next group.
    """
    total = micro_batches * virtual
    ahead = pp - stage - 1 if virtual == 1 else (pp - stage - 1) * 2 + (virtual - 1) * pp
    warm_up = min(ahead, total)

    def place(index: int, *, kind: str) -> tuple[str, int, int]:
        group, inside = divmod(index, pp * virtual)
        chunk = inside // pp
        return kind, chunk if kind == "forward" else virtual - 1 - chunk, group * pp + inside % pp

    yield from (place(index, kind="forward") for index in range(warm_up))
    for index in range(warm_up, total):
        yield place(index, kind="forward")
        yield place(index - warm_up, kind="backward")
    yield from (place(index, kind="backward") for index in range(total - warm_up, total))


def simulate(
    forward: Sequence[float], backward: Sequence[float], micro_batches: int, *, virtual: int = 1, message: float = 0.0
) -> list[Span]:
    """Return all passes of a step.

    Args:
        forward: seconds of each stage's whole forward pass; a chunk takes an equal part.
        backward: the same of the backward pass.
        message: seconds from one stage to the next.
    """
    pp = len(forward)
    # What each stage does in turn, and when it is free again.
    queues = [list(order(stage, pp, micro_batches, virtual)) for stage in range(pp)]
    position, free = [0] * pp, [0.0] * pp
    done: dict[tuple[str, int, int], float] = {}
    spans: list[Span] = []
    last = pp * virtual - 1

    def ready(stage: int, kind: str, chunk: int, index: int) -> float | None:
        place = chunk * pp + stage  # in the model
        if kind == "forward":
            return 0.0 if place == 0 else done.get(("forward", place - 1, index))
        return done.get(("forward", place, index) if place == last else ("backward", place + 1, index))

    # Each stage runs until it has to wait for another one; then the next stage, until all are done.
    while any(position[s] < len(queues[s]) for s in range(pp)):
        moved = False
        for stage in range(pp):
            while position[stage] < len(queues[stage]):
                kind, chunk, index = queues[stage][position[stage]]
                since = ready(stage, kind, chunk, index)
                if since is None:
                    break
                seconds = (forward if kind == "forward" else backward)[stage] / virtual
                begin = max(free[stage], since + (message if since else 0.0))
                free[stage] = begin + seconds
                done[kind, chunk * pp + stage, index] = free[stage]
                named: Literal["forward", "backward"] = "forward" if kind == "forward" else "backward"
                spans.append(Span(stage, chunk, index, named, begin, free[stage]))
                position[stage] += 1
                moved = True
        assert moved, "the order of passes has a cycle"
    return spans


def step_seconds(
    forward: Sequence[float], backward: Sequence[float], micro_batches: int, *, virtual: int = 1, message: float = 0.0
) -> float:
    """Return the time of all passes of a step by a closed formula.

    The slowest stage works without a pause; the others' passes for one micro-batch come before its first and after its
    last one, in chunks if the stages are interleaved.
    """
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    slowest = max(both)
    others = sum(both) - slowest
    fill = others / virtual + 2 * message * (len(both) - 1)
    return micro_batches * slowest + fill
