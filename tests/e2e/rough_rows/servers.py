"""Servers that collect metrics and do not answer, or refuse."""

from __future__ import annotations

import socket
from collections.abc import Callable

from tests.helpers.mlflow_server import RUN_ID, MLflowServer
from tests.helpers.rough import TRAIN, Outcome, Sandbox, Trial

ROW = "Ends: servers"


class _Silent:
    """A port that accepts and says nothing."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=50)
        self.uri = f"http://127.0.0.1:{self.socket.getsockname()[1]}"


def _silent(name: str, *, begun: bool = False) -> Callable[[Sandbox], None]:
    """Return what lets an environment variable of the command name such a port, in a file that the command reads."""

    def arrange(sandbox: Sandbox) -> None:
        server = _Silent()
        sandbox.closing.callback(server.socket.close)
        _noted(sandbox, name, server.uri, begun=begun)

    return arrange


def _refusing(name: str, *, begun: bool = False) -> Callable[[Sandbox], None]:
    def arrange(sandbox: Sandbox) -> None:
        server = _Silent()
        server.socket.close()
        _noted(sandbox, name, server.uri, begun=begun)

    return arrange


def _noted(sandbox: Sandbox, name: str, uri: str, *, begun: bool) -> None:
    (sandbox.root / "env").write_text(f"export {name}={uri}\n")
    if begun:
        (sandbox.root / "out" / "run").mkdir()
        (sandbox.root / "out" / "run" / "mlflow_run_id.txt").write_text(RUN_ID)


def _answering(sandbox: Sandbox) -> None:
    server = sandbox.closing.enter_context(MLflowServer())
    _noted(sandbox, "MLFLOW_TRACKING_URI", server.uri, begun=False)


def _steps_are_short(sandbox: Sandbox, outcome: Outcome) -> str | None:
    from tests.helpers.commands import read_metrics

    seconds = [line["step_seconds"] for line in read_metrics(sandbox.root / "out" / "run")][2:]
    if len(seconds) < 2:
        return "it has not trained"
    return f"a step of {max(seconds):.1f} s" if max(seconds) > 5 else None


ON = ". {root}/env; "
WANDB = "export WANDB_API_KEY=" + "0" * 40 + "; " + ON
TRIALS = [
    Trial("servers/mlflow", ROW, ON + TRAIN + " --mlflow", code=0, arrange=_answering, check=_steps_are_short),
    Trial(
        "servers/mlflow-silent",
        ROW,
        ON + TRAIN + " --mlflow",
        says=("--mlflow",),
        arrange=_silent("MLFLOW_TRACKING_URI"),
        seconds=120,
    ),
    Trial(
        "servers/mlflow-refuses",
        ROW,
        ON + TRAIN + " --mlflow",
        says=("--mlflow",),
        arrange=_refusing("MLFLOW_TRACKING_URI"),
        seconds=120,
    ),
    Trial(
        "servers/mlflow-silent-later",
        ROW,
        ON + TRAIN + " --mlflow",
        code=0,
        says=("metrics.jsonl has all",),
        arrange=_silent("MLFLOW_TRACKING_URI", begun=True),
        check=_steps_are_short,
        seconds=180,
    ),
    Trial(
        "servers/mlflow-refuses-later",
        ROW,
        ON + TRAIN + " --mlflow",
        code=0,
        says=("metrics.jsonl has all",),
        arrange=_refusing("MLFLOW_TRACKING_URI", begun=True),
        check=_steps_are_short,
        seconds=120,
    ),
    Trial(
        "servers/wandb-silent",
        ROW,
        WANDB + TRAIN + " --wandb",
        says=("--wandb",),
        arrange=_silent("WANDB_BASE_URL"),
        seconds=180,
    ),
    Trial(
        "servers/wandb-refuses",
        ROW,
        WANDB + TRAIN + " --wandb",
        says=("--wandb",),
        arrange=_refusing("WANDB_BASE_URL"),
        seconds=180,
    ),
]
