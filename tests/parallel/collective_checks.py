"""Which collective calls steps, saves and loads make inside a test world."""

from __future__ import annotations

import contextlib
import itertools
import resource
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan

from benchmarks.runs import read_lines
from benchmarks.start_world import fake_device_groups
from llava_mcore.checkpoint import parallel_reader, save_plan
from llava_mcore.checkpoint.layout import iteration_folder
from llava_mcore.checkpoint.save_plan import SaveAssignment
from llava_mcore.checkpoint.sharded import num_bytes
from llava_mcore.parallel.agreement import agree
from llava_mcore.parallel.groups import Groups, gather_to_all, initialize, sum_over_ranks, wait_for_all
from llava_mcore.training.iterations import Iterations
from llava_mcore.training.saving.pending import SAVES
from llava_mcore.training.saving.save import Saver
from llava_mcore.training.saving.state import TrainingProgress, resume, state_to_save
from llava_mcore.training.setup import Trainer
from tests.helpers.batches import FakeLoader
from tests.parallel.checks import join
from tests.parallel.fault_checks import loop, weights
from tests.parallel.training_checks import make_trainer, run_config

ON_HOSTS = (
    *("all_reduce", "broadcast", "barrier", "all_gather_object", "gather_object"),
    *("broadcast_object_list", "scatter_object_list", "send", "isend"),
)


@contextlib.contextmanager
def counted(calls: Counter[str], *groups: dist.ProcessGroup) -> Iterator[None]:
    """Count calls of torch.distributed's functions, for some groups or else for groups as large as the world."""

    def wrapped(name: str) -> Any:
        function = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            given = kwargs.get("group")
            size = dist.get_world_size() if given is None else given.size()
            if any(given is group for group in groups) if groups else size == dist.get_world_size():
                calls[name] += 1
            return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as patches:
        for name in ON_HOSTS:
            patches.enter_context(mock.patch.object(dist, name, wrapped(name)))
        yield


def host_side() -> dict[str, Any]:
    """Return what this rank's control group has cost and computes, in a world of replicas of one rank."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    made: list[str] = []
    new_group = dist.new_group

    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append(str(kwargs.get("backend")))
        return new_group(*args, **kwargs)

    with fake_device_groups(), mock.patch.object(dist, "new_group", noted):
        groups = initialize(backend="fake", tensor_model_parallel_size=1, pipeline_model_parallel_size=1)
    calls: Counter[str] = Counter()
    with counted(calls, groups.control):
        sums = sum_over_ranks(groups, [groups.rank, 1, 2**40])
    return {
        "sums": sums,
        "messages": calls["isend"] + calls["send"],
        "gloo groups": made.count("gloo"),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "control of the replica": groups.control_of_replica is not None,
        "problems": agree(groups, "no disk" if groups.rank in (1, 4) else None),
    }


def per_step(checkpoint: str, save_dir: str, tp: int) -> list[dict[str, int]]:
    """Return the world-wide calls between hosts of each step of a run of 6, from one fetch to the next."""
    groups = join(tp, 1)
    steps: list[Counter[str]] = []
    calls: Counter[str] = Counter()
    fetch = Iterations.fetch

    def begin(self: Iterations, flags: Any) -> Any:
        steps.append(calls.copy())
        return fetch(self, flags)

    run = run_config(tp, 1, checkpoint, save_dir, **{"training.train_iters": 6, "name": f"steps{tp}"})
    # The groups belong to the world that `loop` trains in, as the trainer's do.
    with (
        mock.patch.object(Iterations, "fetch", begin),
        counted(calls, groups.control, groups.control_of_replica or groups.control),
    ):
        loop(groups, run, FakeLoader)
    return [dict(after - before) for before, after in itertools.pairwise(steps)]


def saves(checkpoint: str, save_dir: str) -> dict[str, Any]:
    """Save several times; return the calls of each save, and whether checkpoints and their contents are the same."""
    groups = join(1, 1)
    flags = {"checkpoint.save": True, "checkpoint.save_optim": True, "checkpoint.load_optim": True}
    flags |= {"training.train_iters": 2, "name": "saves"}
    run = run_config(1, 1, checkpoint, save_dir, **flags)
    trainer, hf = loop(groups, run, FakeLoader), Path(checkpoint) / "iter_0000000" / "hf"
    place = {"place": 1}
    saver, calls = Saver(trainer, hf), [Counter[str]() for _ in range(3)]
    for number, counter in enumerate(calls):
        with counted(counter):
            saver.save(TrainingProgress(10 + number), place, background=number == 1)
            saver.finish(10 + number)
    nothing: Counter[str] = Counter()
    with counted(nothing):
        saver.prepare(TrainingProgress(13))
    before = _contents(run.run_dir, 12)
    wait_for_all(groups)
    Saver(trainer, hf).save(TrainingProgress(12), place)
    found = {"calls": calls, "prepared after a save": nothing, "equal": before == _contents(run.run_dir, 12) != {}}
    found |= _loads(groups, trainer, iteration_folder(run.run_dir, 12)) | {"new": _other_structure(trainer)}
    return found | {"divided": _divided(groups, trainer, hf)}


def _divided(groups: Groups, trainer: Trainer, hf: Path) -> dict[str, Any]:
    """Divide the tensors long before the first save, write several files per rank and read them with several threads.

    Returns:
        The calls of the division and of the save, both ranks' bytes as expected and as written, and `_loads`.
    """
    saver, calls = Saver(trainer, hf), [Counter[str]() for _ in range(2)]
    sizes = [num_bytes(x) for x in SaveAssignment(groups).divide(state_to_save(trainer, TrainingProgress(1)))]
    threads: set[str] = set()
    read_data = FileSystemReader.read_data

    def watched(self: FileSystemReader, plan: LoadPlan, planner: Any) -> Any:
        threads.add(threading.current_thread().name)
        return read_data(self, plan, planner)

    with (
        mock.patch.object(save_plan, "FILE_BYTES", 20_000),
        mock.patch.object(parallel_reader, "JOB_BYTES", 10_000),
        mock.patch.object(parallel_reader, "cores_per_rank", lambda: 3),
        mock.patch.object(FileSystemReader, "read_data", watched),
    ):
        with counted(calls[0]):
            saver.prepare(TrainingProgress(1))
        with counted(calls[1]):
            saver.save(TrainingProgress(20), {"place": 1})
        loads = _loads(groups, trainer, iteration_folder(trainer.run.run_dir, 20))
    written = read_lines(trainer.run.run_dir / SAVES)[-1]["gigabytes"]
    return loads | {
        "calls": calls,
        "bytes": (sum_over_ranks(groups, [sum(sizes)])[0], round(written * 1e9)),
        "files": len(_contents(trainer.run.run_dir, 20)),
        "threads": len(threads - {"MainThread"}),
    }


def _contents(run_dir: Path, iteration: int) -> dict[str, bytes]:
    """Return the files with tensors and objects of a checkpoint."""
    return {path.name: path.read_bytes() for path in iteration_folder(run_dir, iteration).glob("*.distcp")}


def _loads(groups: Groups, trainer: Trainer, checkpoint: Path) -> dict[str, Any]:
    """Begin and resume; return what all ranks have read, and whether weights and moments are those that were saved."""
    read: list[tuple[str, tuple[int, ...]]] = []
    read_data = FileSystemReader.read_data

    def recorded(self: FileSystemReader, plan: LoadPlan, planner: Any) -> Any:
        items = [item.storage_index for item in plan.items]
        read.extend((x.fqn, tuple(x.offset)) for x in items if x.offset is not None)
        return read_data(self, plan, planner)

    with mock.patch.object(FileSystemReader, "read_data", recorded):
        fresh = make_trainer(groups, trainer.run)
        resume(fresh)
    assert fresh.loaded_from == checkpoint
    everyone = Counter(item for items in gather_to_all(groups, read) for item in items)
    mine, theirs = weights(trainer), weights(fresh)
    moments = [
        [state[name] for one in x.optimizer.chained_optimizers for state in one.optimizer.state.values()]
        for x in (trainer, fresh)
        for name in ("exp_avg", "exp_avg_sq")
    ]
    pairs = [*zip(moments[0], moments[2], strict=True), *zip(moments[1], moments[3], strict=True)]
    return {
        "read": everyone,
        "shares": [len(items) for items in gather_to_all(groups, read)],
        "resumed": all(torch.equal(mine[name], theirs[name]) for name in mine)
        and all(torch.equal(a, b) for a, b in pairs),
    }


def _other_structure(trainer: Trainer) -> list[tuple[bool, bool]]:
    """Return whether a save is planned: the first, the same, one without a part on rank 1, that again, and the first
    once more; and whether it gets a new strategy."""
    plan, found = SaveAssignment(trainer.groups), []
    plan.divide(state_to_save(trainer, TrainingProgress(1)))
    for number in range(5):
        before = plan.strategy
        state = state_to_save(trainer, TrainingProgress(1))
        if number in (2, 3) and trainer.groups.rank == 1:
            del state["optimizer"]
        found.append((plan.begin(state), plan.strategy is not before))
        plan.done()
    return found
