"""Kill training runs (tp 2 x dp 2 on the CPU) with -9 at random instants, resume them, compare with an unbroken run.

    python -m tests.e2e.chaos --runs 50 --processes 10 --markdown table.md

Half of the kills wait for a save to begin and come at a random moment of it; every other run saves in the background,
every other pair of runs has a distributed optimizer. Every second checkpoint is one of those that the next replaces
(--non-persistent-save-interval); in every third run those have their tensors in a folder of the node's own
(--non-persistent-local-ckpt-dir).
Every run must end with losses that are bitwise those of the unbroken one, in iterations that are all there once.
The exit code is 1 if one does not.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_mcore.apps.import_hf import import_hf
from llava_mcore.checkpoint.layout import latest_iteration
from llava_mcore.config.schema import NON_PERSISTENT
from tests.helpers.commands import ROOT, command, kill_tree, read_metrics, run
from tests.helpers.shards import make_dataset
from tests.helpers.tiny_hf import make_hf_llava

ITERATIONS = 24
INTERVAL = 4
COMPARED = ("iteration", "loss", "grad_norm", "lr", "num_tokens", "consumed_samples", "num_conversations")
TIMEOUT = 300
PARTIAL = ".iter_*.partial"


@dataclass(frozen=True)
class Outcome:
    """One killed run. `during_save`: a checkpoint was half written at that moment. `resumed_at`: 0 is the start.
    `from_replaced`: from a checkpoint that the next would have replaced. `on_node`: those were on the node's disk."""

    number: int
    distributed: bool
    background: bool
    aim: str
    killed_after: int
    during_save: bool
    resumed_at: int
    from_replaced: bool
    on_node: bool
    equal: bool

    def row(self) -> str:
        """Return a row of the table."""
        saving = "yes" if self.during_save else "no"
        kind = "background" if self.background else "foreground"
        source = f" (non-persistent{', own disk' if self.on_node else ''})" if self.from_replaced else ""
        verdict = "bitwise equal" if self.equal else "**differs**"
        optimizer = "distributed" if self.distributed else "plain"
        place = f"{self.resumed_at}{source}"
        return f"| {self.number} | {optimizer} | {kind} | {self.killed_after} | {saving} | {place} | {verdict} |"


HEADER = """| run | optimizer | saves in the | killed after iteration | half-written save there | resumed at | losses |
|---|---|---|---|---|---|---|"""


class Chaos:
    """A model, data, and the losses of an unbroken run of them."""

    def __init__(self, root: Path, *, distributed: bool = False) -> None:
        """Make everything below `root` and train the unbroken run, with the distributed optimizer if asked."""
        self.root, self.distributed = root, distributed
        root.mkdir(exist_ok=True)
        make_hf_llava(root / "hf", text_overrides={"attention_dropout": 0.1})
        import_hf(root / "hf", root / "megatron", tp=2)
        make_dataset(root / "data")
        run("train/run.py", *self.flags("whole", background=False), timeout=TIMEOUT)
        self.whole = self.compared("whole")
        assert [values[0] for values in self.whole] == list(range(1, ITERATIONS + 1))

    def flags(self, name: str, *, background: bool, on_node: bool = False) -> list[Any]:
        """Return the command line of one run."""
        root = self.root
        places = ("--megatron-load-dir", root / "megatron", "--tokenizer-load-dir", root / "hf")
        out = ("--save-dir", root / "save", "--data-path", root / "data", "--name", name)
        sizes = ("--micro-batch-size", 1, "--global-batch-size", 4, "--seq-length", 64, "--lr", 1e-3)
        saving = ("--save", "--save-optim", "--load-optim", "--save-interval", 2 * INTERVAL, "--keep-last", 2)
        replaced = ("--non-persistent-save-interval", INTERVAL)
        rest = ("--train-iters", ITERATIONS, "data.num_workers=1", "data.shuffle_buffer_size=16", "--timeout", 120)
        return [
            "-g",
            4,
            "--tp",
            2,
            *places,
            *out,
            *sizes,
            *saving,
            *replaced,
            *rest,
            *(["--async-save"] if background else []),
            *(["--dist-optim"] if self.distributed else []),
            *(["--non-persistent-local-ckpt-dir", root / "disk"] if on_node else []),
        ]

    def compared(self, name: str) -> list[list[Any]]:
        """Return what must be equal, iteration by iteration."""
        return [[line[key] for key in COMPARED] for line in read_metrics(self.root / "save" / name)]

    def kill_once(self, number: int, rng: random.Random) -> Outcome:
        """Start a run, kill it at a random instant, resume it to its end."""
        background, on_node, aim = number % 2 == 1, number % 3 == 0, rng.choice(["step", "save"])
        name = f"run{number}"
        folder = self.root / "save" / name
        flags = self.flags(name, background=background, on_node=on_node)
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command("train/run.py", *flags), stdout=output, stderr=output, start_new_session=True, cwd=ROOT
            )
            try:
                self._wait(process, folder, aim, rng)
            finally:
                kill_tree(process.pid)
                process.wait()
        saving = any(folder.rglob(PARTIAL))
        killed_after = max((line["iteration"] for line in read_metrics(folder)), default=0)
        resumed_at, source = ITERATIONS, ""
        if latest_iteration(folder) != ITERATIONS:  # else it was killed after its last checkpoint: nothing is left
            text = run("train/run.py", *flags, timeout=TIMEOUT)
            found = re.search(r"resumed at iteration (\d+) of (\S+)", text)
            resumed_at, source = (int(found[1]), found[2]) if found else (0, "")
        equal = self.compared(name) == self.whole
        replaced = NON_PERSISTENT in source
        return Outcome(
            number, self.distributed, background, aim, killed_after, saving, resumed_at, replaced, on_node, equal
        )

    def _wait(self, process: subprocess.Popen[bytes], folder: Path, aim: str, rng: random.Random) -> None:
        """Return at the instant at which to kill."""
        end = time.monotonic() + TIMEOUT
        reached = (
            INTERVAL * rng.randrange(1, ITERATIONS // INTERVAL) if aim == "save" else rng.randrange(ITERATIONS - 1)
        )
        while process.poll() is None and time.monotonic() < end:
            lines = read_metrics(folder)
            if lines and lines[-1]["iteration"] >= max(1, reached):
                break
            time.sleep(0.02)
        while aim == "save" and process.poll() is None and time.monotonic() < end:
            if any(folder.rglob(PARTIAL)):
                break
            time.sleep(0.001)
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(rng.uniform(0, 0.25))


def main(argv: Sequence[str] | None = None) -> int:
    """Kill as many runs as asked for and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1, help="runs at a time; each has four processes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--markdown", type=Path, help="write the table to this file too")
    args = parser.parse_args(argv)
    rows = [HEADER]
    print(HEADER, flush=True)
    equal = True
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.processes) as pool:
        kinds = [Chaos(Path(folder) / str(distributed), distributed=distributed) for distributed in (False, True)]

        def kill(number: int) -> Outcome:
            return kinds[number // 2 % 2].kill_once(number, random.Random(f"{args.seed} {number}"))

        for outcome in pool.map(kill, range(1, args.runs + 1)):
            equal &= outcome.equal
            rows.append(outcome.row())
            print(rows[-1], flush=True)
            if args.markdown is not None:
                args.markdown.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
