"""Processes on this machine that connect, read positions and take empty steps, as the hosts of a run on GPUs do.

All are forked from a process that has imported everything, so that each takes only the memory that it changes. The
groups of the devices are torch's fake ones; those between the hosts are gloo's.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

from llava_mcore.data.loader.turns import states_to_read
from llava_mcore.data.samples import Batch
from llava_mcore.files.torch_files import load_tensors
from llava_mcore.media.batch_fields import IMAGE_FIELDS
from llava_mcore.parallel.groups import Groups, initialize, wait_for_all
from llava_mcore.training.fetch import SkipBudget, fetch_step
from llava_mcore.training.saving import state
from llava_mcore.training.saving.state import LOADER_FOLDER, loader_file

STREAMS_PER_RANK = 2


def measure(folder: Path, processes: int, tp: int, pp: int, steps: int) -> list[dict[str, Any]]:
    """Run the processes; return what each has measured. The folder must be empty.

    Raises:
        RuntimeError: one has failed.
    """
    write_positions(folder, processes // (tp * pp))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    gc.collect()
    gc.freeze()  # a collection in a child would copy what it shares with this process
    children = []
    for rank in range(processes):
        variables = address | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        children.append(_fork(variables, folder / f"rank{rank}.json", lambda: host(folder, tp, pp, steps)))
    failed = [rank for rank, pid in enumerate(children) if os.waitpid(pid, 0)[1]]
    if failed:
        raise RuntimeError(f"ranks {failed} have failed")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]


def write_positions(folder: Path, dp: int) -> None:
    """Write the files from which `dp` data-parallel ranks resume."""
    (folder / LOADER_FOLDER).mkdir()
    num_streams = dp * STREAMS_PER_RANK
    for rank in range(dp):
        streams = {n: {"dataset": None, "num_batches": 0, "further": 1} for n in range(rank, num_streams, dp)}
        position = {"format": 3, "settings": {"data.num_streams": num_streams}, "streams": streams}
        torch.save(position, folder / LOADER_FOLDER / loader_file(rank))


def host(folder: Path, tp: int, pp: int, steps: int) -> dict[str, Any]:
    """Do what a rank's host does without a model: connect, read positions, take steps without images."""
    sockets, begin = num_sockets(), time.perf_counter()
    with fake_device_groups():
        groups = initialize(backend="fake", tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    connected = time.perf_counter()
    files = _read_positions(folder, groups)
    loader = EmptyBatches() if groups.loads_data else None
    seconds = []
    for _ in range(steps):
        wait_for_all(groups)
        start = time.perf_counter()
        fetch_step(groups, loader, 1, SkipBudget(0.0), IMAGE_FIELDS, (False, False, False))
        seconds.append(time.perf_counter() - start)
    result = {
        "seconds to connect": connected - begin,
        "sockets": num_sockets() - sockets,
        "files of positions": files,
        "seconds per step": sorted(seconds)[len(seconds) // 2],
        "seconds of gloo's own sum": _seconds_of_ring(groups, steps),
        "private MiB": _private_mib(),
    }
    wait_for_all(groups)
    return result


class EmptyBatches:
    """A loader of micro-batches of eight tokens without images."""

    def __next__(self) -> Batch:
        media = {
            name: torch.empty([0, *(n or 0 for n in field.item_shape)], dtype=field.dtypes[0])
            for name, field in IMAGE_FIELDS.items()
        }
        ids = torch.ones(1, 8, dtype=torch.int64)
        keys = {"sample_keys": ["empty"], "num_tokens": 8}
        return Batch(input_ids=ids, labels=ids, loss_mask=torch.ones(1, 8), position_ids=ids, media=media, **keys)

    def state(self) -> Any:
        """Return the position: there is none."""
        return None

    def read_again(self, state: Any, number: int) -> list[Batch]:
        """Return other ones."""
        return [next(self) for _ in range(number)]


@contextlib.contextmanager
def fake_device_groups() -> Iterator[None]:
    """Let `initialize` connect the hosts but not the devices."""
    begin = dist.init_process_group

    def init_process_group(_backend: str, timeout: datetime.timedelta) -> None:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(*address, size, is_master=rank == 0, timeout=timeout)
        begin("fake", store=dist.PrefixStore("hosts", store), rank=rank, world_size=size, timeout=timeout)

    with mock.patch.object(dist, "init_process_group", init_process_group):
        yield


def num_sockets() -> int:
    """Return the number of this process's open sockets."""
    folder, number = Path("/proc/self/fd"), 0
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):  # the folder's own descriptor is closed by now
            number += os.readlink(folder / name).startswith("socket:")
    return number


def _read_positions(folder: Path, groups: Groups) -> int:
    """Read the positions of this rank's streams; return the number of files."""
    if not groups.loads_data:
        return 0
    with mock.patch.object(state, "load_tensors", wraps=load_tensors) as reads:
        saved = state.SavedLoaderStates(folder)
        num_streams = saved[0]["settings"]["data.num_streams"]
        for index in states_to_read(len(saved), num_streams, groups.dp_rank, groups.dp_size):
            saved[index]
    return reads.call_count


def _seconds_of_ring(groups: Groups, steps: int) -> float:
    """Return the median time of a sum as gloo computes it, in a ring of all hosts."""
    values, seconds = torch.zeros(16, dtype=torch.int64), []
    for _ in range(steps):
        wait_for_all(groups)
        start = time.perf_counter()
        dist.all_reduce(values, group=groups.control)
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[len(seconds) // 2]


def _private_mib() -> float:
    """Return the memory that only this process has."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def _fork(variables: dict[str, str], result: Path, work: Callable[[], dict[str, Any]]) -> int:
    """Do something in a child of this process, which has no threads; return its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ |= variables
        torch.set_num_threads(1)
        result.write_text(json.dumps(work()))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
