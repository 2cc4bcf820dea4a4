"""Which rank is named when several have failed, and how long the others have."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llava_mcore.compat.torchrun import limit_closing
from llava_mcore.launch.torchrun import Run, _print_cause, cause
from llava_mcore.launch.worker import lost_connection


def failures(**codes: int) -> dict[int, Any]:
    return {int(rank.removeprefix("rank")): SimpleNamespace(exitcode=code) for rank, code in codes.items()}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (failures(rank0=1, rank1=1, rank2=-9), (2, -9)),
        (failures(rank0=1, rank3=2), (3, 2)),
        (failures(rank0=124, rank1=124), (0, 124)),
        (failures(rank1=1), (1, 1)),
        (failures(rank0=1, rank1=-11, rank2=2), (2, 2)),
        (failures(rank0=1, rank1=-11), (1, -11)),
    ],
)
def test_a_rank_that_lost_its_connection_is_not_the_cause(found: dict[int, Any], expected: tuple[int, int]) -> None:
    assert cause(found, found) == expected


def test_a_rank_that_crashed_while_others_ended_with_an_error() -> None:
    crashed = failures(rank1=-11)
    assert cause(crashed, crashed | failures(rank0=2, rank2=-9)) == (0, 2)
    assert cause(crashed, crashed | failures(rank0=1, rank2=-9)) == (1, -11)
    for code in (128 + signal.SIGTERM, 75, 124):  # stopped, or hanging: the crash is the news
        assert cause(crashed, crashed | failures(rank0=code)) == (1, -11)
        assert cause(crashed | failures(rank0=code), crashed | failures(rank0=code)) == (1, -11)
    assert cause(failures(rank2=-9), failures(rank2=-9, rank0=2)) == (2, -9)


def test_the_stacks_of_a_rank_that_crashed_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stacks = tmp_path / "stacks" / "rank_00001.txt"
    stacks.parent.mkdir()
    stacks.touch()
    assert _print_cause(1, -signal.SIGKILL, tmp_path) == 137  # it had no time to write any
    stacks.write_text("Fatal Python error: Segmentation fault")
    assert _print_cause(1, -signal.SIGSEGV, tmp_path) == 139
    killed, crashed = capsys.readouterr().err.splitlines()
    assert killed == "error: rank 1 was ended by SIGKILL; all ranks were stopped"
    assert crashed == f"error: rank 1 was ended by SIGSEGV; all ranks were stopped; its stacks: {stacks}"


@pytest.mark.parametrize(("code", "seconds"), [(-9, 3), (1, 3), (124, 1), (75, 30)])
def test_how_long_the_other_ranks_have(code: int, seconds: int) -> None:
    given: list[float] = []

    class Context:
        _failures = failures(rank1=code)

        def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
            given.append(timeout)
            self._failures[0] = SimpleNamespace(exitcode=-15)

    run = Run.__new__(Run)
    run.first = {}
    api: Any = SimpleNamespace(SubprocessContext=Context)
    limit_closing(api, run.seconds_to_end)
    context = Context()
    context._close(signal.SIGTERM)
    assert given == [seconds] and list(run.first) == [1], "only that one failed by itself"


def test_a_torch_that_ends_its_workers_otherwise_is_noticed() -> None:
    class Context:
        def _close(self, death_sig: signal.Signals) -> None:
            """Lacks the time."""

    api: Any = SimpleNamespace(SubprocessContext=Context)
    with pytest.raises(AttributeError, match=r"torch has changed .*_close"):
        limit_closing(api, lambda failures: 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[/pytorch/third_party/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:31",
            True,
        ),
        ("[…/gloo/transport/tcp/pair.cc:534] Read error [127.0.0.1]:31435: Connection reset by peer", True),
        ("mat1 and mat2 shapes cannot be multiplied (4x8 and 7x8)", False),
    ],
)
def test_what_a_rank_is_told_when_another_has_ended(text: str, expected: bool) -> None:
    assert lost_connection(RuntimeError(text)) is expected
