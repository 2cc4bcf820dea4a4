"""Conversions killed with SIGKILL at random points: does anything unfinished look finished, and does a rerun work?

    python -m benchmarks.convert_kills --points 30 --params 1B

Makes a random LLaVA, then starts each command over and over and kills it (the command's own process, nothing else) a
random time after it has begun to write, until that many were killed unfinished. Each start finds what the last kill
left. A target that exists must have come by renaming. In the end each command runs undisturbed with --verify, and the
exported files must be the source's, byte for byte.
"""

from __future__ import annotations

import argparse
import filecmp
import multiprocessing
import random
import shutil
import signal
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from convert import TEXTS, files_of, make_model

from llava_mcore.__main__ import main as main_of_llava_mcore

PRELOAD = ["llava_mcore.convert.import_hf", "llava_mcore.convert.export_hf"]
"""Imported once by the server that the commands are forked from: they begin to write at once."""


def convert(step: str, source: Path, target: Path, workers: int, verify: bool) -> None:
    """Run one command at (4, 2)."""
    flags = ("--hf-dir", "--megatron-dir") if step == "import-hf" else ("--megatron-dir", "--hf-dir")
    words = [step, flags[0], str(source), flags[1], str(target), "--tp", "4", "--pp", "2", "--workers", str(workers)]
    sys.exit(main_of_llava_mcore([*words, *(["--verify"] if verify else [])]))


def begin(step: str, source: Path, target: Path, workers: int, *, verify: bool = False) -> BaseProcess:
    """Start a command and return when it writes. An earlier run's leftovers are not mistaken for that."""
    partial = partial_of(target)
    start = time.time()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=convert, args=(step, source, target, workers, verify))
    process.start()
    while process.is_alive() and not (partial.exists() and partial.stat().st_mtime > start):
        time.sleep(0.001)
    return process


def partial_of(target: Path) -> Path:
    """Return where an unfinished target is."""
    return target.parent / f".{target.name}.partial"


def kill_at_random(
    step: str, source: Path, target: Path, points: int, workers: int, draw: random.Random
) -> tuple[int, int]:
    """Kill runs until `points` died unfinished; return that and how many had just finished, which are removed."""
    process = begin(step, source, target, workers)
    start = time.monotonic()
    process.join()
    seconds = time.monotonic() - start
    shutil.rmtree(target)
    killed = finished = 0
    while killed < points:
        process = begin(step, source, target, workers)
        time.sleep(draw.uniform(0, seconds))
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL), f"exit code {process.exitcode}"
        if target.exists():
            assert not partial_of(target).exists(), "a finished folder and a partial one"
            finished += 1
            shutil.rmtree(target)
        else:
            killed += 1
    return killed, finished


def main() -> None:
    """Parse the command line, kill, rerun, compare, print."""
    parser = argparse.ArgumentParser(description="Conversions killed at random points")
    parser.add_argument("--points", type=int, default=30)
    parser.add_argument("--params", choices=TEXTS, default="1B")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="where to work (default: the system's temporary folder)")
    args = parser.parse_args()
    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        folder = Path(name)
        make_model(folder / "hf", args.params)
        for step, source, target in (("import-hf", "hf", "megatron"), ("export-hf", "megatron", "back")):
            killed, finished = kill_at_random(step, folder / source, folder / target, args.points, args.workers, draw)
            rerun = begin(step, folder / source, folder / target, args.workers, verify=True)
            rerun.join()
            assert rerun.exitcode == 0, "the rerun failed"
            left = sorted(p.name for p in folder.iterdir())
            print(
                f"{step}: {killed} killed while writing, {finished} just finished; rerun verified; {left}", flush=True
            )
        for path in files_of(folder / "hf"):
            same = filecmp.cmp(path, folder / "back" / path.relative_to(folder / "hf"), shallow=False)
            assert same, f"{path.name} differs"
        print("the export is the source, byte for byte")


if __name__ == "__main__":
    main()
