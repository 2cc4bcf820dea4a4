"""Process groups of gloo (torch 2.11 to 2.15) whose threads do not write to the same string.

Each group of gloo has two threads. A thread that has finished an operation writes the operation's name to one string
of the group (`lastCompletedWorkName`), without a lock. Names of more than 15 characters are on the heap. One of them is
ALLGATHER_COALESCED, by which Megatron-FSDP and megatron-core's distributed optimizer gather parameters. When two
threads write at the same time, both free the string that was there. The process ends soon, by SIGABRT or SIGSEGV.
Waiting for each operation does not prevent that: a thread writes the name after those who wait have continued.

So groups get one thread here. Operations of a group then run one after the other, in the order in which they were
started, which is the same on all ranks. Operations of different groups still run side by side.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

from llava_mcore.compat.required import replace_name, required


class OneThreadGloo:
    """A stand-in for torch's class ProcessGroupGloo, which makes groups with one thread."""

    def __init__(self, original: Any) -> None:
        self.original = original
        for name in ("_Options", "create_device", "create_default_device"):
            required(original, name)

    def __call__(
        self, store: Any, rank: int, size: int, timeout: datetime.timedelta, enable_reconfigure: bool = False
    ) -> Any:
        """Return a group over the devices that torch would use.

        Args:
            enable_reconfigure: torch 2.15 passes it.
        """
        if enable_reconfigure:
            raise NotImplementedError(f"{__name__} makes no groups of gloo that can be reconfigured")
        options = self.original._Options()
        for name, value in {"_threads": 1, "_timeout": timeout, "_devices": self._devices()}.items():
            replace_name(options, name, value)
        return self.original(store, rank, size, options)

    def __instancecheck__(self, instance: object) -> bool:
        """Answer isinstance(…, ProcessGroupGloo), which torch asks."""
        return isinstance(instance, self.original)

    def _devices(self) -> list[Any]:
        interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        if interfaces:
            return [self.original.create_device(interface=name) for name in interfaces]
        return [self.original.create_default_device()]


def use_one_thread() -> None:
    """Give one thread to every group of gloo that this process makes from now on."""
    from torch.distributed import distributed_c10d  # its import takes long

    original = required(distributed_c10d, "ProcessGroupGloo")
    if not isinstance(original, OneThreadGloo):
        replace_name(distributed_c10d, "ProcessGroupGloo", OneThreadGloo(original))
