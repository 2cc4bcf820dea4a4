"""Other trials: Ctrl-C, help, folders with an equals sign."""

from __future__ import annotations

from llava_mcore.cli.base.commands import COMMANDS
from tests.helpers.rough import TRAIN, Outcome, Sandbox, Trial

ROW = "Ends: others"
# A shell with job control: its background jobs get Ctrl-C.
INTERRUPT = (
    "set -m; {train} & pid=$!; while [ ! -s {out}/run/metrics.jsonl ]; do sleep 0.05; kill -0 $pid || break; done; "
    "kill -INT -- -$pid; wait $pid"
)
IMPORTS = (
    "PYTHONPROFILEIMPORTTIME=1 llava-mcore {command} --help 2>&1 | grep -qE '[|] +(torch|transformers)$'; "
    "test ${PIPESTATUS[1]} = 1"
)
DATED = "{root}/date=2024-01-01/x"


def _few_lines(sandbox: Sandbox, outcome: Outcome) -> str | None:
    after = outcome.text[outcome.text.rfind("step ") :].splitlines()
    return None if len(after) < 6 else f"{len(after)} lines after the last step"


def _bound(sandbox: Sandbox, outcome: Outcome) -> str | None:
    folder = str(sandbox.root / "date=2024-01-01")
    return None if outcome.text.count(folder) > 1 else "the data's folder is not bound into the container"


def _dated(sandbox: Sandbox) -> None:
    (sandbox.root / "date=2024-01-01" / "x").mkdir(parents=True)
    (sandbox.root / "x.sif").write_bytes(b"")


TRIALS = [
    Trial(
        "others/ctrl-c",
        ROW,
        INTERRUPT.replace("{train}", TRAIN.replace("iters 4", "iters 4000")),
        code=130,
        check=_few_lines,
        one_message=False,
    ),
    *(Trial(f"others/help-{name}", ROW, IMPORTS.replace("{command}", name), code=0) for name in COMMANDS),
    Trial(
        "others/equals-sign",
        ROW,
        TRAIN.replace("{data}", DATED) + " --sif-path {root}/x.sif --dry-run",
        code=0,
        arrange=_dated,
        check=_bound,
    ),
]
