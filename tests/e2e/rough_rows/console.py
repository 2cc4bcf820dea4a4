"""What a process is started with: consoles that close, encodings, homes, temporary folders, working folders."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.helpers.rough import TRAIN, Outcome, Sandbox, Trial

ROW = "Ends: console and environment"
SHOW = "llava-mcore show-config"
JAPANESE = "日本語 é"


def _trained(sandbox: Sandbox, outcome: Outcome) -> str | None:
    file = sandbox.root / "out" / "run" / "metrics.jsonl"
    return None if file.is_file() and len(file.read_text().splitlines()) == 4 else "it has not trained"


def _japanese(sandbox: Sandbox) -> None:
    shutil.copytree(sandbox.shared.path("hf"), sandbox.root / "out" / JAPANESE)


def _strange(sandbox: Sandbox) -> None:
    shutil.copytree(sandbox.shared.path("hf"), sandbox.root / "out" / os.fsdecode(b"\xff\xfe"))


def _full_tmp(sandbox: Sandbox) -> None:
    sandbox.tiny_disk(sandbox.root / "tmp", "4K")
    with Path(sandbox.root / "tmp" / "filler").open("wb") as file:
        file.write(bytes(4096))


def _closed_home(sandbox: Sandbox) -> None:
    (sandbox.root / "home").chmod(0o555)


LATIN = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
TRIALS = [
    # cat's way: a closed pipe ends a command silently, with the exit code of SIGPIPE.
    Trial(
        "console/head",
        ROW,
        SHOW + " | true; exit ${PIPESTATUS[0]}",
        code=141,
        never=("Broken pipe", "error"),
        one_message=False,
        quick=True,
    ),
    Trial(
        "console/inspect-head",
        ROW,
        "PYTHONUNBUFFERED=1 llava-mcore inspect {hf} | true; exit ${PIPESTATUS[0]}",
        code=141,
        never=("Broken pipe",),
        one_message=False,
    ),
    Trial("console/no-stdout", ROW, SHOW + " >&-", code=0, quick=True),
    Trial("console/no-streams", ROW, SHOW + " >&- 2>&- <&-", code=0),
    Trial(
        "console/full-stdout",
        ROW,
        SHOW + " > /dev/full",
        says=(
            "standard output",
            "No space left",
        ),
        quick=True,
    ),
    Trial(
        "console/full-stdout-unbuffered", ROW, "PYTHONUNBUFFERED=1 " + SHOW + " > /dev/full", says=("No space left",)
    ),
    Trial("console/train-head", ROW, TRAIN + " | head -n 1 > /dev/null; exit ${PIPESTATUS[0]}", code=0, check=_trained),
    Trial("console/train-no-stdout", ROW, TRAIN + " >&-", code=0, check=_trained),
    Trial("console/train-full-stdout", ROW, TRAIN + " > /dev/full", code=0, check=_trained),
    Trial("console/ascii", ROW, f"llava-mcore inspect '{{out}}/{JAPANESE}'", code=0, arrange=_japanese, environ=LATIN),
    Trial("console/ascii-error", ROW, "llava-mcore inspect '{out}/名'", says=("neither",), environ=LATIN),
    Trial("console/ascii-train", ROW, TRAIN.replace("{out}", "'{out}/名'"), says=("LC_ALL=C.UTF-8",), environ=LATIN),
    Trial(
        "console/name-without-encoding",
        ROW,
        "llava-mcore inspect {out}/$'\\xff\\xfe'",
        says=("not valid UTF-8",),
        arrange=_strange,
    ),
    Trial("console/save-without-encoding", ROW, TRAIN.replace("{out}", "{out}/$'\\xff\\xfe'"), says=("UTF-8",)),
    Trial("console/tmp-missing", ROW, TRAIN, code=0, environ={"TMPDIR": "/nowhere"}),
    Trial("console/tmp-full", ROW, TRAIN, code=0, arrange=_full_tmp),
    Trial("console/home-missing", ROW, TRAIN + " --tensorboard", code=0, environ={"HOME": "/nowhere"}),
    Trial("console/home-closed", ROW, TRAIN + " --tensorboard", code=0, arrange=_closed_home, permissions=True),
    Trial("console/no-home", ROW, "unset HOME; " + TRAIN, code=0),
    Trial(
        "console/deleted-folder",
        ROW,
        "mkdir {out}/d; cd {out}/d; rmdir {out}/d; " + SHOW,
        says=("current folder", "deleted"),
        quick=True,
    ),
]
