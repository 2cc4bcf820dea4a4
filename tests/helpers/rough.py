"""Rough trials: a command as a user types it, in a fresh process, on files with something wrong.

A trial defines a few small files, the command, and how it has to end: the exit code, what the last
message says, how long it may take. Besides, every trial must end without a traceback, must write nothing outside its
own output folder, and must not run what a file brings along.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers.commands import ROOT, kill_tree

MAY_CHANGE = ("out", "home", "tmp")
"""Folders of a trial that its command may write into."""
_FUNCTIONS = f"""
llava-mcore() {{ "{sys.executable}" -m llava_mcore "$@"; }}
run.py() {{ "{sys.executable}" "{ROOT}/scripts/train/run.py" "$@"; }}
build_llava_jp.py() {{ "{sys.executable}" "{ROOT}/scripts/convert/build_llava_jp.py" "$@"; }}
"""
_PERMISSIONS = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")
"""Root may do everything; without these capabilities permissions hold for it too."""


class CannotBeTried(Exception):
    """This machine lacks what a trial needs, such as the right to mount."""


class Shared:
    """Files that trials start from, each made when it is first asked for and never changed."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, name: str) -> Path:
        """Return hf (a LLaVA folder), megatron (its import), data (prepared shards) or save (a finished run `run`)."""
        path = self.root / name
        if not path.exists():
            self._make(name, path)
        return path

    def _make(self, name: str, path: Path) -> None:
        if name == "hf":
            from tests.helpers.tiny_hf import make_hf_llava

            make_hf_llava(path)
        elif name == "data":
            from tests.helpers.shards import make_dataset

            make_dataset(path)
        elif name == "megatron":
            flags = ("import-hf", "--hf-dir", str(self.path("hf")), "--megatron-dir", str(path))
            subprocess.run([sys.executable, "-m", "llava_mcore", *flags], check=True, capture_output=True, cwd=ROOT)
        else:
            assert name == "save", name
            text = f"{TRAIN.replace('{out}', str(path))} --name run --save-interval 2 --save-optim"
            code, said, _ = _bash(text.format(**{n: self.path(n) for n in ("hf", "data", "megatron")}), {}, 600)
            assert code == 0, said


TRAIN = (
    "run.py -g 1 --backend gloo --megatron-load-dir {megatron} --tokenizer-load-dir {hf} --data-path {data} "
    "--save-dir {out} --train-iters 4 --micro-batch-size 2 --global-batch-size 4 --seq-length 64 data.num_workers=0"
)
"""A whole training command; more flags may follow."""


class Sandbox:
    """The folder of one trial: files of its own, or the shared ones under the same names."""

    def __init__(self, root: Path, shared: Shared, closing: contextlib.ExitStack) -> None:
        self.root, self.shared, self.closing = root, shared, closing
        for name in MAY_CHANGE:
            (root / name).mkdir(parents=True)

    def path(self, name: str) -> Path:
        """Return the trial's own file or folder of this name, else the shared one."""
        own = self.root / name
        return own if own.exists() or name in MAY_CHANGE else self.shared.path(name)

    def own(self, name: str) -> Path:
        """Return a copy of a shared folder, to be damaged."""
        target = self.root / name
        if not target.exists():
            shutil.copytree(self.shared.path(name), target, symlinks=True)
        return target

    def resumable(self) -> Path:
        """Copy the finished run into the output folder, where `TRAIN --name run --load-optim` finds it."""
        shutil.copytree(self.shared.path("save"), self.root / "out", dirs_exist_ok=True)
        return self.root / "out" / "run"

    def tiny_disk(self, folder: Path, size: str) -> None:
        """Mount a small disk there until the trial has ended. Raises CannotBeTried where that is impossible."""
        folder.mkdir(parents=True, exist_ok=True)
        _mount("-t", "tmpfs", "-o", f"size={size}", "none", str(folder))
        self.closing.callback(subprocess.run, ["umount", "-l", str(folder)], check=False)

    def read_only_disk(self, folder: Path) -> None:
        """Mount an empty disk that nobody can write to, not even root."""
        self.tiny_disk(folder, "500M")
        _mount("-o", "remount,ro", str(folder))

    def filled(self, command: str) -> str:
        """Put paths where a command has names in braces."""
        names = ("hf", "megatron", "data", "save", *MAY_CHANGE)
        paths = {name: self.path(name) for name in names if "{" + name + "}" in command}
        for name, path in {**paths, "root": self.root, "marker": self.root / "marker"}.items():
            command = command.replace("{" + name + "}", str(path))
        return command


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBeTried(f"mount: {done.stderr.strip()}")


@dataclass(frozen=True)
class Outcome:
    """How a command ended. `text`: all that it printed, as on a terminal."""

    code: int | None
    text: str
    seconds: float

    @property
    def last_message(self) -> str:
        """What begins at the last `error: `; everything, if there is none."""
        starts = [match.start() for match in re.finditer(r"^(\S+: )?error: ", self.text, re.MULTILINE)]
        return self.text[starts[-1] :] if starts else self.text


@dataclass(frozen=True)
class Trial:
    """One row of the table.

    `command` is a line of bash in which {hf}, {megatron}, {data}, {out}, {root} stand for paths, and {marker} for a
    file that nothing must make. `says`: texts of the last message; `never`: texts that must be nowhere.
    """

    name: str
    row: str
    """The group that it belongs to."""
    command: str
    code: int | None = 2
    """None: any, if it only ends."""
    says: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    arrange: Callable[[Sandbox], object] = lambda sandbox: None
    check: Callable[[Sandbox, Outcome], str | None] = lambda sandbox, outcome: None
    """Returns whatever else is wrong."""
    environ: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 60
    one_message: bool = True
    """Whether there must be exactly one `error: `; for exit codes that are not 0."""
    permissions: bool = False
    """Whether file permissions are to hold, for root too."""
    writes: tuple[str, ...] = ()
    """Other folders of the trial that the command may write into."""
    quick: bool = False
    """Among those that `make test` runs."""


def try_it(trial: Trial, shared: Shared, root: Path, *, patience: float = 1) -> tuple[Outcome, list[str]]:
    """Run a trial in a folder of its own, which is removed; return how it ended and everything that is wrong with that.

    Args:
        patience: what time limits are multiplied by, on a machine that does other things too.

    Raises:
        CannotBeTried: the machine lacks something.
    """
    with contextlib.ExitStack() as closing:
        sandbox = Sandbox(root, shared, closing)
        closing.callback(shutil.rmtree, root, ignore_errors=True)
        trial.arrange(sandbox)
        command = sandbox.filled(trial.command)
        before = _snapshot(sandbox, trial)
        homes = {"HOME": str(root / "home"), "TMPDIR": str(root / "tmp")}
        code, text, seconds = _bash(
            command, {**homes, **trial.environ}, patience * trial.seconds, permissions=trial.permissions
        )
        outcome = Outcome(code, text, seconds)
        found = _wrong(trial, outcome)
        if (root / "marker").exists():
            found.append("what a file brought along was executed")
        found += [f"wrote outside its output folder: {path}" for path in _changed(before, _snapshot(sandbox, trial))]
        more = trial.check(sandbox, outcome)
        return outcome, [*found, *([] if more is None else [more])]


def _wrong(trial: Trial, outcome: Outcome) -> list[str]:
    found = []
    if outcome.code is None:
        return [f"hung: no end after {outcome.seconds:.0f} s"]
    if trial.code is not None and outcome.code != trial.code:
        found.append(f"exit code {outcome.code}, expected {trial.code}")
    if "Traceback" in outcome.text:
        found.append("a traceback")
    errors = len(re.findall(r"^(?:\S+: )?error: ", outcome.text, re.MULTILINE))
    if trial.code and trial.one_message and errors != 1:
        found.append(f"{errors} messages that begin with 'error: '")
    found += [f"does not say {text!r}" for text in trial.says if text not in outcome.last_message]
    return found + [f"says {text!r}" for text in trial.never if text in outcome.text]


def _bash(
    command: str, environ: Mapping[str, str], seconds: float, *, permissions: bool = False
) -> tuple[int | None, str, float]:
    """Run a line of bash; return its exit code (None: it had to be killed), what it printed, and its seconds."""
    start = time.monotonic()
    env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **environ}
    words: Sequence[str] = ["bash", "-c", _FUNCTIONS + command]
    if permissions:
        if shutil.which(_PERMISSIONS[0]) is None:
            raise CannotBeTried("no setpriv")
        words = [*(_PERMISSIONS if os.geteuid() == 0 else ()), *words]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, start_new_session=True, cwd=ROOT
    ) as process:
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
            return None, said.decode("utf-8", "replace"), time.monotonic() - start
    return process.returncode, said.decode("utf-8", "replace"), time.monotonic() - start


def _snapshot(sandbox: Sandbox, trial: Trial) -> dict[Path, tuple[int, int]]:
    """Return size and time of every file that must not change: the trial's, the shared ones."""
    files: dict[Path, tuple[int, int]] = {}
    allowed = [sandbox.root / name for name in (*MAY_CHANGE, *trial.writes)]
    for top in (sandbox.root, sandbox.shared.root):
        for here, folders, names in os.walk(top):
            folders[:] = [name for name in folders if Path(here, name) not in allowed]
            for path in (Path(here, name) for name in names):
                state = path.lstat()
                files[path] = (state.st_size, state.st_mtime_ns)
    return files


def _changed(before: Mapping[Path, object], after: Mapping[Path, object]) -> list[Path]:
    return sorted(path for path in {*before, *after} if before.get(path) != after.get(path))
