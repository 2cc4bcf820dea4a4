"""The simulation of the schedule: its order beside megatron-core's rules, and the closed formula beside it."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from llava_mcore.plan.layout import RunLayout
from llava_mcore.plan.schedule import Span, order, simulate, step_seconds


def end(spans: list[Span]) -> float:
    return max(x.end for x in spans)


@pytest.mark.parametrize("virtual", [1, 2, 4])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_every_pass_runs_once_after_what_it_needs(pp: int, virtual: int) -> None:
    if pp == 1 and virtual > 1:
        return
    spans = simulate([1.0] * pp, [2.0] * pp, 8, virtual=virtual, message=0.1)
    counts = Counter((x.stage, x.chunk, x.micro_batch, x.kind) for x in spans)
    assert len(counts) == 2 * pp * virtual * 8
    assert set(counts.values()) == {1}
    at = {(x.kind, x.chunk * pp + x.stage, x.micro_batch): x for x in spans}
    for (kind, place, number), span in at.items():
        before = ("forward", place - 1, number) if kind == "forward" else ("backward", place + 1, number)
        assert before not in at or at[before].end <= span.begin
        assert kind == "forward" or at["forward", place, number].end <= span.begin
    # A stage does one thing at a time.
    for stage in range(pp):
        own = sorted((x.begin, x.end) for x in spans if x.stage == stage)
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(own))


def test_the_first_stage_keeps_as_many_micro_batches_as_there_are_stages() -> None:
    warm_up = [kind for kind, *_ in order(0, 4, 16)][:5]
    assert warm_up == ["forward"] * 4 + ["backward"]


@pytest.mark.parametrize(("virtual", "micro_batches"), [(1, 16), (1, 2), (2, 16), (4, 8)])
def test_memory_counts_the_passes_that_wait_for_their_backward_pass(virtual: int, micro_batches: int) -> None:
    """Those of megatron-core's order, in which interleaved stages begin with twice as many per later stage."""
    layout = RunLayout(4, 1, 4, (8,) * 4, 1, micro_batches, virtual=virtual)
    for stage in range(4):
        kinds = [kind for kind, *_ in order(stage, 4, micro_batches, virtual)]
        first = kinds.index("backward")
        assert first == min(
            4 - stage if virtual == 1 else 2 * (3 - stage) + 4 * (virtual - 1) + 1, micro_batches * virtual
        )
        assert layout.in_flight(stage) == first / virtual


@pytest.mark.parametrize("micro_batches", [4, 16, 96])
@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_the_formula_is_the_simulation_of_equal_stages(pp: int, micro_batches: int) -> None:
    forward, backward = [1.0] * pp, [2.0] * pp
    assert step_seconds(forward, backward, micro_batches) == pytest.approx(
        end(simulate(forward, backward, micro_batches))
    )


def test_interleaving_divides_the_bubble() -> None:
    forward, backward = [1.0] * 4, [2.0] * 4
    for virtual in (2, 4):
        simulated = end(simulate(forward, backward, 16, virtual=virtual))
        assert simulated == pytest.approx(step_seconds(forward, backward, 16, virtual=virtual))
        assert simulated == pytest.approx(16 * 3 + 3 * 3 / virtual)


@pytest.mark.parametrize("slow", [0, 1, 3])
def test_the_formula_is_near_the_simulation_of_unequal_stages(slow: int) -> None:
    forward = [1.0 + 0.4 * (stage == slow) for stage in range(4)]
    backward = [2 * x for x in forward]
    simulated = end(simulate(forward, backward, 32))
    assert step_seconds(forward, backward, 32) == pytest.approx(simulated, rel=0.03)
