"""Disturb training runs on the CPU at random, resume them, and compare them with uninterrupted ones.

    python -m tests.e2e.chaos --rounds 100 --processes 5 --markdown table.md

A round is one disturbance: a process is killed or stopped, a signal comes, bytes of the newest checkpoint are flipped,
the disk is full (a small one of the run's own where this user may mount, else files may not grow). Several rounds meet
one run, one after the other; some come while it starts, some during a step, some during a save. After each:
the exit code and the last line are right, no process is left after 5 seconds, no port, and what has been trained so far
is bitwise that of an uninterrupted run. What a run has trained in the end is the same as without any round.
The exit code is 1 if something is not so; the table says what.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llava_mcore.checkpoint.complete import incomplete, iterations
from llava_mcore.checkpoint.layout import TRACKER, iteration_folder, latest_iteration
from llava_mcore.config.schema import NON_PERSISTENT
from tests.e2e.chaos_kinds import KINDS, Expected, ballast, flip_newest, passed_over, wait_for_moment
from tests.e2e.chaos_outcome import HEADER, Outcome, summary
from tests.e2e.chaos_run import Ended, Running, still_open
from tests.e2e.chaos_world import (
    COMMAND_TIMEOUT,
    INTERVAL,
    ITERATIONS,
    LAYOUTS,
    LAYOUTS_FULLY_SHARDED,
    LAYOUTS_WITH_EXPERTS,
    LAYOUTS_WITH_GRAPHS,
    World,
    last_line,
    make_material,
)

ROUNDS_OF_A_RUN = 8
SECONDS_UNTIL_GONE = 5.0
DISK_BYTES = 256 << 20


class Disturbed:
    """One run of a world, from its first round until it has trained all its iterations."""

    def __init__(self, world: World, name: str, save_dir: Path) -> None:
        self.world, self.name, self.save_dir = world, name, save_dir
        self.folder = save_dir / name
        self.flipped: tuple[Path, str] | None = None
        self.passed_over: set[str] = set()
        self.finished = False

    def start(self) -> Running:
        """Start, or resume."""
        output = self.save_dir.with_name(f"{self.save_dir.name}.{self.name}.out")  # not on a disk that gets full
        flags = self.world.flags(self.name, self.save_dir)
        return Running(output, self.folder, flags, self.world.layout.environment)

    def round(self, outcome: Outcome, rng: random.Random) -> bool:
        """Let it happen; return False if the run has come to its end before."""
        kind = KINDS[outcome.kind]
        with self.start() as running:
            try:
                wait_for_moment(running, outcome.kind, outcome.aim, rng, ITERATIONS - 2 * INTERVAL)
                ports = running.ports()
                expected = kind.act(running, rng)
            except Ended:
                if self._refused_the_flipped_one(running, outcome):
                    return self.round(outcome, rng)
                self._has_ended(running, outcome)
                return False
            outcome.seconds = self._wait(running, expected)
            self._check_end(running, expected, ports, outcome)
            self._check_start(running, outcome)
        ballast(self.save_dir).unlink(missing_ok=True)
        self._check_folder(outcome)
        if kind.flips:
            self.flipped = flip_newest(self.folder, rng)
        return True

    def finish(self, outcome: Outcome) -> None:
        """Train what is left."""
        with self.start() as running:
            running.process.wait(COMMAND_TIMEOUT)
            if self._refused_the_flipped_one(running, outcome):
                return self.finish(outcome)
            self._has_ended(running, outcome)

    def _wait(self, running: Running, expected: Expected) -> float:
        """Wait for the end; return after how many seconds, from when it was due, no process was left."""
        limit = SECONDS_UNTIL_GONE + 25
        if expected.orderly:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(COMMAND_TIMEOUT)
            return running.wait_for_end(limit)
        return max(0.0, running.wait_for_end(expected.after + limit) - expected.after)

    def _check_end(self, running: Running, expected: Expected, ports: list[int], outcome: Outcome) -> None:
        left, outcome.code = running.processes(), running.process.poll() or 0
        outcome.output = running.text()
        line = last_line(outcome.output)
        if left:
            outcome.wrong.append(f"{len(left)} processes were left")
        elif outcome.seconds > SECONDS_UNTIL_GONE:
            outcome.wrong.append("took too long")
        if outcome.code not in expected.codes:
            outcome.wrong.append(f"exit code {outcome.code}, expected {expected.codes[0]}")
        if re.search(expected.last_line, line) is None:
            outcome.wrong.append(f"last line: {line[:200]}")
        busy = [] if left else still_open(ports, seconds=SECONDS_UNTIL_GONE - outcome.seconds)
        if busy:
            outcome.wrong.append(f"ports {busy} are still open")

    def _check_start(self, running: Running, outcome: Outcome) -> None:
        """Check that it did not resume from damaged files, and that it trains what the uninterrupted run does."""
        place = running.resumed_at()
        outcome.resumed_at = 0 if place is None else place[0]
        if self.flipped is not None and "first iteration done" in running.text():
            checkpoint, file = self.flipped
            if place is not None and place[1] == str(checkpoint):
                outcome.wrong.append(f"resumed from {checkpoint.name}, of which {file} has flipped bytes")
            elif not passed_over(running.text(), checkpoint, file):
                outcome.wrong.append(f"no word about {checkpoint.name}, of which {file} has flipped bytes")
            self.passed_over.add(checkpoint.name)
            self.flipped = None
        self._compare(outcome)

    def _compare(self, outcome: Outcome) -> None:
        found = {line[0]: line for line in self.world.compared(self.folder)}
        expected = {line[0]: line for line in self.world.whole}
        outcome.iteration = max(found, default=0)
        if any(line != expected[iteration] for iteration, line in found.items()):
            outcome.wrong.append("the losses differ")
        if len(found) != outcome.iteration and outcome.kind != "disk full":  # which takes lines, too
            outcome.wrong.append("the losses of iterations are missing")

    def _check_folder(self, outcome: Outcome) -> None:
        """See that the tracker names a complete checkpoint, or a damaged one that is deleted or replaced."""
        newest = latest_iteration(self.folder)
        if newest is None or iteration_folder(self.folder, newest).name in self.passed_over:
            return
        problem = incomplete(iteration_folder(self.folder, newest))
        if newest not in iterations(self.folder) or problem is not None:
            outcome.wrong.append(f"the tracker names iteration {newest}: {problem}")

    def _refused_the_flipped_one(self, running: Running, outcome: Outcome) -> bool:
        """If the run did not start beside the flipped checkpoint, delete that, as a user would who reads why; and what
        is left where no complete one is."""
        if self.flipped is None or running.process.poll() in (None, 0):
            return False
        checkpoint, file = self.flipped
        code, text = running.process.wait(), running.text()
        if code != 2 or "Traceback" in text or (str(checkpoint) not in text and file not in text):
            outcome.wrong.append(
                f"beside {checkpoint.name}, of which {file} has flipped bytes: {last_line(text)[:200]}"
            )
        shutil.rmtree(checkpoint)
        self.passed_over.add(checkpoint.name)
        for root in (self.folder, self.folder / NON_PERSISTENT):
            left = [iteration_folder(root, i) for i in iterations(root)]
            if all(incomplete(folder) for folder in left):
                for path in (*left, root / TRACKER):
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        self.flipped = None
        return True

    def _has_ended(self, running: Running, outcome: Outcome) -> None:
        """See that it has ended well, and has trained what the uninterrupted run has."""
        self.finished = True
        code, outcome.output = running.process.wait(), running.text()
        self._check_start(running, outcome)
        if code != 0:
            outcome.wrong.append(f"ended by itself with code {code}: {last_line(running.text())[:200]}")
        elif outcome.iteration != ITERATIONS:
            outcome.wrong.append(f"ended after iteration {outcome.iteration}")


class Chain:
    """Rounds one after the other, on as many runs as they take."""

    def __init__(self, worlds: Sequence[World], number: int, seed: int, disk: Path, kinds: Sequence[str]) -> None:
        """worlds: every run is of the next one. disk: folder that the runs write to. kinds: what may happen."""
        first = number % len(worlds)
        self.worlds = itertools.cycle([*worlds[first:], *worlds[:first]])
        self.disk, self.number, self.rng = disk, number, random.Random(f"{seed} {number}")
        self.kinds, self.deck = kinds, list[str]()

    def play(self, numbers: Sequence[int]) -> Iterator[Outcome]:
        """Yield an outcome for each round, and one for the end of each run."""
        waiting = list(numbers)
        for count in itertools.count(1):
            run = Disturbed(next(self.worlds), f"run{self.number}_{count}", self.disk)
            for _ in range(ROUNDS_OF_A_RUN):
                if run.finished or not waiting:
                    break
                kind = self._next_kind(run.world)
                outcome = Outcome(waiting[0], str(run.world.layout), kind, self.rng.choice(KINDS[kind].aims))
                if run.round(outcome, self.rng):
                    waiting.pop(0)
                    yield outcome
                elif outcome.wrong:
                    yield outcome
            if not run.finished:
                outcome = Outcome(0, str(run.world.layout), "nothing", "end")
                run.finish(outcome)
                yield outcome
            shutil.rmtree(run.folder)
            if not waiting:
                return

    def _next_kind(self, world: World) -> str:
        """Deal the kinds out of a shuffled deck; without loader processes their share falls to the ranks."""
        if not self.deck:
            self.deck = [name for name in self.kinds for _ in range(KINDS[name].weight)]
            self.rng.shuffle(self.deck)
        kind = self.deck.pop()
        return kind if world.layout.loaders else kind.replace("loader", "rank")


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Give a folder with a small disk of its own where this user may mount one."""
    folder.mkdir(parents=True)
    options = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    mounted = shutil.which("mount") is not None and not subprocess.run(options, capture_output=True).returncode
    if not mounted:
        print(f"{folder}: no disk can be mounted; files of a run may not grow instead", flush=True)
    try:
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def said_at_once() -> Iterator[None]:
    """Print an error in a thread, which is raised only when the other threads have ended."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        raise


def main(argv: Sequence[str] | None = None) -> int:
    """Play as many rounds as asked for and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--processes", type=int, default=1, help="runs at a time; each has two or four ranks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="what may happen (default: all)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--graphs", action="store_true", help="data-parallel runs with emulated graphs alone")
    kind.add_argument("--fsdp", action="store_true", help="fully sharded runs alone")
    kind.add_argument("--experts", action="store_true", help="runs whose ranks divide experts alone")
    parser.add_argument("--logs", type=Path, help="write what was printed in rounds that went wrong to this folder")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file too")
    args = parser.parse_args(argv)
    outcomes: list[Outcome] = []
    lock = threading.Lock()
    print(HEADER, flush=True)

    def report(outcome: Outcome) -> None:
        with lock:
            outcomes.append(outcome)
            print(outcome.row(), flush=True)
            if outcome.wrong and args.logs is not None:
                args.logs.mkdir(parents=True, exist_ok=True)
                (args.logs / f"{outcome.number}.txt").write_text(outcome.output, encoding="utf-8")
            if args.markdown is not None:
                rows = [outcome.row() for outcome in sorted(outcomes, key=lambda x: x.number or args.rounds + 1)]
                args.markdown.write_text("\n".join([summary(outcomes), "", HEADER, *rows, ""]), encoding="utf-8")

    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(args.processes) as pool:
        root = Path(name)
        material = make_material(root / "material", with_experts=args.experts)
        special = {
            LAYOUTS_WITH_GRAPHS: args.graphs, LAYOUTS_WITH_EXPERTS: args.experts, LAYOUTS_FULLY_SHARDED: args.fsdp
        }  # fmt: skip
        layouts = next((layouts for layouts, is_chosen in special.items() if is_chosen), LAYOUTS)
        layouts = layouts[: max(args.processes, -(-args.rounds // ROUNDS_OF_A_RUN))]
        worlds = list(pool.map(lambda x: World(material, root / f"world{layouts.index(x)}", x), layouts))

        def play(number: int) -> None:
            with small_disk(root / f"chain{number}") as disk, said_at_once():
                chain = Chain(worlds, number, args.seed, disk, args.kinds)
                for outcome in chain.play(range(number + 1, args.rounds + 1, args.processes)):
                    report(outcome)

        list(pool.map(play, range(args.processes)))
    print(f"\n{summary(outcomes)}")
    return 1 if any(outcome.wrong for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
