"""Groups of gloo with one thread: the threads of a group write to the same string."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import datetime
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from llava_mcore.compat.gloo import OneThreadGloo, use_one_thread
from llava_mcore.parallel.groups import single_process

HOUR = datetime.timedelta(hours=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
def test_every_group_has_one_thread() -> None:
    """Those of torch, of megatron-core and our own."""
    use_one_thread()  # again: importing the package has done it
    with single_process() as groups:
        own = dist.new_group(backend="gloo", timeout=HOUR)
        for group in (dist.group.WORLD, groups.data_parallel, groups.tensor_parallel, groups.control, own):
            backend = group._get_backend(torch.device("cpu"))
            assert backend.options._threads == 1
            assert isinstance(backend, distributed_c10d.ProcessGroupGloo)
        assert backend.options._timeout == HOUR
        assert not isinstance(own, distributed_c10d.ProcessGroupGloo)


class FakeGloo:
    """Remembers what a group is made of."""

    _Options = staticmethod(lambda: SimpleNamespace(_threads=2, _timeout=None, _devices=[]))
    create_device = staticmethod(lambda interface: f"device of {interface}")
    create_default_device = staticmethod(lambda: "device of the host's name")

    def __init__(self, store: object, rank: int, size: int, options: Any) -> None:
        self.place, self.options = (rank, size), options


@pytest.mark.parametrize(
    ("interfaces", "devices"),
    [
        ("", ["device of the host's name"]),
        ("eth0", ["device of eth0"]),
        ("eth0,eth1", ["device of eth0", "device of eth1"]),
    ],
)
def test_groups_use_the_given_network_interfaces(
    interfaces: str, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    group = OneThreadGloo(FakeGloo)(None, 1, 3, timeout=HOUR)
    assert group.place == (1, 3)
    assert vars(group.options) == {"_threads": 1, "_timeout": HOUR, "_devices": devices}


@pytest.mark.parametrize("name", ["_Options", "create_device", "create_default_device"])
def test_a_gloo_of_another_torch_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FakeGloo, name)
    monkeypatch.setattr(distributed_c10d, "ProcessGroupGloo", FakeGloo)
    with pytest.raises(AttributeError, match=f"FakeGloo has no '{name}'"):
        use_one_thread()


@pytest.mark.parametrize("name", ["_threads", "_timeout", "_devices"])
def test_other_options_of_gloo_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = FakeGloo._Options()
    delattr(options, name)
    monkeypatch.setattr(FakeGloo, "_Options", lambda: options)
    with pytest.raises(AttributeError, match=f"has no '{name}'"):
        OneThreadGloo(FakeGloo)(None, 0, 1, timeout=HOUR)


def test_groups_that_can_be_reconfigured_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="reconfigured"):
        OneThreadGloo(FakeGloo)(None, 0, 1, HOUR, enable_reconfigure=True)
