"""What the start of a large world and each of its steps cost the hosts: counted for any size, measured with a few.

    python -m benchmarks.start_at_scale --ranks 1024 --tp 1 --pp 1
    python -m benchmarks.start_at_scale --ranks 1024 --tp 8 --pp 4
    python -m benchmarks.start_at_scale --processes 64 --json out.json

"plain" is what megatron-core and gloo do by themselves: groups on gloo beside the devices' ones, a connection from each
rank to all others, positions of all ranks read by each, sums in a ring. Groups are counted by making them with torch's
fake process group. Linux only.
"""

from __future__ import annotations

import argparse
import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import torch.distributed as dist
from megatron.core import parallel_state  # noqa: TID251  (nothing is trained here)
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import start_world
from benchmarks.record import ROOT, show, write_record
from llava_mcore.parallel import collectives, groups, share
from llava_mcore.training import fetch
from llava_mcore.training.saving import state


def main() -> None:
    """Parse the command line, count or measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024, help="size of the world that is counted")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--processes", type=int, help="run this many processes instead")
    parser.add_argument("--steps", type=int, default=20, help="of the processes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.processes is None:
        rows = count(args.ranks, args.tp, args.pp)
    else:
        with tempfile.TemporaryDirectory() as folder:
            rows = [summary(start_world.measure(Path(folder), args.processes, args.tp, args.pp, args.steps))]
    show(rows)
    if args.json is not None:
        write_record(args.json, rows, gpus=0)


def count(ranks: int, tp: int, pp: int) -> list[dict[str, Any]]:
    """Return a row for each cost: with megatron-core's and gloo's defaults, now, and the code that decides it."""
    replica, dp = tp * pp, ranks // (tp * pp)
    plain, made = (made_groups(ranks, tp, pp, gloo=gloo) for gloo in (True, False))
    control = 2 + (replica > 1)  # the world's, that of agreements, and this rank's replica's
    steps = (rounds(ranks), rounds(replica))
    everyone = ranks - 1 + 3 * (dp - 1) + replica - 1  # in the world's group, three of the replicas, and the replica's
    partners = most_partners(ranks) + 2 + (steps[1] if control > 2 else 0)  # two neighbors in the ring of agreements

    def row(what: str, before: int, now: int, code: Callable[..., Any]) -> dict[str, Any]:
        return {"per rank": what, "plain": f"{before:,}", "now": f"{now:,}", "code": place(code)}

    return [
        row("calls that make groups", plain + 1 + dp, made + control, groups.initialize),
        row("groups on gloo that it is in", 5, control, groups.replica_groups),
        row("sockets to other ranks", everyone, partners, groups.initialize),
        row("sockets of rank 0 after a save", everyone, ranks - 1, groups.gather_to_first),
        # The first says how many streams there are.
        row("files of positions at a resume", dp, 2, state.SavedLoaderStates),
        row("the same, over all ranks", dp * dp, 2 * dp - 1, state.SavedLoaderStates),
        row("sums over all hosts per step", 1, 1, fetch.count_all),
        row("messages one after the other in it", 2 * (ranks - 1), steps[0], collectives.sum_on_hosts),
        row("the same, of the batch's shapes", steps[1], steps[1], share.share_step),
    ]


def made_groups(ranks: int, tp: int, pp: int, *, gloo: bool) -> int:
    """Return how many groups megatron-core makes: every rank makes those of all ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with mock.patch.object(dist, "new_group", side_effect=lambda *_, **__: dist.group.WORLD) as made:
            parallel_state.initialize_model_parallel(tp, pp, create_gloo_process_groups=gloo)
        return made.call_count
    finally:
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():  # else the line above has ended it, as one of the groups
            dist.destroy_process_group()


def rounds(ranks: int) -> int:
    """Return after how many messages all ranks have what each had: one per bit, and two if they are no power of two."""
    bits = ranks.bit_length() - 1
    return bits if ranks == 1 << bits else bits + 2


def most_partners(ranks: int) -> int:
    """Return the largest number of ranks with which one exchanges messages in sums, barriers and broadcasts."""
    power = 1 << ranks.bit_length() - 1
    bits = [1 << i for i in range(ranks.bit_length())]

    def partners(rank: int) -> set[int]:
        summing = {rank ^ bit for bit in bits if rank < power and bit < power} | {rank - power, rank + power}
        waiting = {(rank + sign * bit) % ranks for bit in bits if bit < ranks for sign in (1, -1)}
        return {other for other in summing | waiting if 0 <= other < ranks} - {rank}

    return max(len(partners(rank)) for rank in range(ranks))


def place(code: Callable[..., Any]) -> str:
    """Return where something is defined."""
    file = Path(inspect.getsourcefile(code) or "").relative_to(ROOT)
    return f"{file}:{inspect.getsourcelines(code)[1]} {code.__name__}"


def summary(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one row for all processes."""

    def most(name: str) -> Any:
        return max(result[name] for result in measured)

    return {
        "processes": len(measured),
        "s to connect": round(most("seconds to connect"), 2),
        "sockets": max(result["sockets"] for result in measured[1:] or measured),
        "sockets of rank 0": measured[0]["sockets"],
        "files of positions": most("files of positions"),
        "ms per empty step": round(1e3 * most("seconds per step"), 2),
        "ms of gloo's own sum": round(1e3 * most("seconds of gloo's own sum"), 2),
        "private MiB": round(most("private MiB")),
    }


if __name__ == "__main__":
    main()
