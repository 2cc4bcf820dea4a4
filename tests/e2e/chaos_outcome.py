"""What came of a round, and of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.e2e.chaos_kinds import KINDS

HEADER = """| round | run | what happened | when | after iteration | exit code | gone after | resumed at | verdict |
|---|---|---|---|---|---|---|---|---|"""


@dataclass
class Outcome:
    """One round. `wrong`: what was not as it has to be."""

    number: int
    run: str
    kind: str
    aim: str
    iteration: int = 0
    code: int = 0
    seconds: float = 0.0
    resumed_at: int = 0
    output: str = ""
    wrong: list[str] = field(default_factory=list)

    def row(self) -> str:
        """Return a row of the table."""
        verdict = "; ".join(self.wrong) or "ok"
        return (
            f"| {self.number} | {self.run} | {self.kind} | {self.aim} | {self.iteration} | {self.code} | "
            f"{self.seconds:.1f} s | {self.resumed_at} | {verdict} |"
        )


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return a table by kind."""
    lines = ["| what happened | rounds | all right | gone after, longest |", "|---|---|---|---|"]
    for kind in [*KINDS, "nothing"]:
        found = [outcome for outcome in outcomes if outcome.kind == kind]
        if found:
            right = sum(not outcome.wrong for outcome in found)
            lines.append(f"| {kind} | {len(found)} | {right} | {max(x.seconds for x in found):.1f} s |")
    right = sum(not outcome.wrong for outcome in outcomes)
    return "\n".join([*lines, f"| all | {len(outcomes)} | {right} | {max(x.seconds for x in outcomes):.1f} s |"])
