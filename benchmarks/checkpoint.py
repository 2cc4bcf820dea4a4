"""Speed of saving and loading a checkpoint, compared with cp of the same bytes on the same disk.

    python -m benchmarks.checkpoint --gib 1 --processes 2 --rounds 3 --dir /where/checkpoints/go

Every process holds its part of `--gib` GiB of fp32 tensors, as tensor parallelism divides them. Saving counts until
all of it is on the disk (fsync, tracker included); "training waits" is the part during which training waits if the rest
happens in the background. cp is followed by fsync of the copy. Loading reads files that the page cache may still hold,
as cp does. A save includes its checksums, a load is counted without and with the comparison of every file with its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from megatron.core.dist_checkpointing.mapping import ShardedTensor

from llava_mcore.checkpoint.checksums import of_files, write_checksums
from llava_mcore.checkpoint.dist import StateWrite, load_state
from llava_mcore.checkpoint.layout import write_tracker
from llava_mcore.checkpoint.verify import damage_found_together
from llava_mcore.files.atomic import move, sync_tree
from llava_mcore.parallel.groups import Groups, gather_to_all, initialize

TENSOR_MIB = 64
GIB = 2**30


def main() -> None:
    """Measure, or be one of the processes that are measured."""
    args = parse()
    if "RANK" in os.environ:
        measure(args)
        return
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", str(args.processes), __file__, *sys.argv[1:], "--dir", folder]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        rounds = json.loads((Path(folder) / "rounds.json").read_text())
    table = Table(title=f"{args.gib:g} GiB, {args.processes} processes, median of {args.rounds}")
    for name in ("", "seconds", "GB/s"):
        table.add_column(name)
    for what in rounds[0]:
        seconds = statistics.median(values[what] for values in rounds)
        table.add_row(what, f"{seconds:.2f}", f"{args.gib * GIB / seconds / 1e9:.2f}")
    Console().print(table)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=Path.cwd())
    return parser.parse_args()


def measure(args: argparse.Namespace) -> None:
    """Save and load in turns with cp, `rounds` times."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    groups = initialize(backend=backend, tensor_model_parallel_size=1, pipeline_model_parallel_size=1)
    number = max(1, int(args.gib * 1024 / TENSOR_MIB / dist.get_world_size()))
    rounds = []
    for i in range(args.rounds):
        folder = args.dir / f"iter_{i:07d}"
        seconds = save(groups, folder, make_state(number), i)
        seconds["verification"] = timed(partial(verify, groups, folder))
        seconds["load without it"] = timed(partial(load_state, make_state(number), folder))
        seconds["load with it"] = timed(partial(verify, groups, folder)) + seconds["load without it"]
        seconds["cp and fsync"] = timed(partial(copy, folder))
        rounds.append(seconds)
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
    if dist.get_rank() == 0:
        (args.dir / "rounds.json").write_text(json.dumps(rounds))
    dist.destroy_process_group()


def make_state(number: int) -> dict[str, ShardedTensor]:
    """Return this rank's tensors, each a row of a whole one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = TENSOR_MIB * 2**20 // 4 // 1024
    return {
        f"tensor{i}": ShardedTensor.from_rank_offsets(
            f"tensor{i}", torch.randn(rows, 1024, device=device), (0, rank, size)
        )
        for i in range(number)
    }


def save(groups: Groups, folder: Path, state: dict[str, ShardedTensor], iteration: int) -> dict[str, float]:
    """Save as a run does, in the background.

    Returns:
        The seconds until all is done, of those the ones that checksums took, and those until training continues.
    """
    unfinished = folder.with_name(f".{folder.name}.partial")
    if dist.get_rank() == 0:
        unfinished.mkdir()
    dist.barrier()
    start = time.perf_counter()
    write = StateWrite(dict(state), unfinished, copy=True)
    waited = time.perf_counter() - start
    write.write()
    begin = time.perf_counter()
    of_files([unfinished / name for name in write.checksums])  # as `write` has just done
    summing = time.perf_counter() - begin
    start += summing
    write.finish()
    checksums = {name: text for part in gather_to_all(groups, write.checksums) for name, text in part.items()}
    if dist.get_rank() == 0:
        write_checksums(unfinished, checksums)
        sync_tree(unfinished, already=".distcp")
        move(unfinished, folder)
        write_tracker(folder.parent, iteration)
    dist.barrier()
    seconds = time.perf_counter() - start
    return {"save": seconds, "save without checksums": seconds - summing, "save: training waits": waited}


def verify(groups: Groups, folder: Path) -> None:
    """Compare every file with its checksum, as a run does before it loads."""
    assert damage_found_together(groups, folder) is None


def copy(folder: Path) -> None:
    """Copy the checkpoint with cp and flush the copy; rank 0 only."""
    if dist.get_rank() == 0:
        target = folder.with_name("copy")
        subprocess.run(["cp", "-r", str(folder), str(target)], check=True)
        sync_tree(target)
        shutil.rmtree(target)


def timed(action: Callable[[], object]) -> float:
    """Return the seconds until all ranks have done something."""
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
