"""Shards that are open: no more than the process may have, each once, and without their indexes."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest
from megatron.energon.epathlib import EPath

from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.data.loader.train_loader import TrainLoader
from llava_mcore.data.storage import tar_files
from llava_mcore.data.storage.tar_files import OpenShards
from llava_mcore.errors import DataError
from llava_mcore.files.regular import allowed_files
from tests.helpers.bad_data_makers import index, messages, write_tar
from tests.helpers.tiny_hf import make_hf_llava

BLEND = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits: {train: {blend: [%s]}}\n"


def open_files(folder: Path) -> list[str]:
    """What this process has open of a folder."""
    links = [Path("/proc/self/fd") / number for number in os.listdir("/proc/self/fd")]
    names = [os.readlink(link) for link in links if link.is_symlink()]
    return [name for name in names if name.startswith(str(folder))]


def dataset(folder: Path, shards: int) -> Path:
    talk = {"json": messages(("user", "q"), ("assistant", "a"))}
    for shard in range(shards):
        keys = (f"{folder.name}{shard:03d}{number:03d}" for number in range(8))
        write_tar(folder / f"{shard:06d}.tar", dict.fromkeys(keys, talk))
    return index(folder)


def test_a_blend_keeps_to_what_the_process_may_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_hf_llava(tmp_path / "hf")
    for name in ("a", "b"):
        dataset(tmp_path / name, 24)
    blend = tmp_path / "blend.yaml"
    blend.write_text(BLEND % ", ".join(f"{{weight: 1, path: ./{name}}}" for name in ("a", "b")))
    monkeypatch.setattr(tar_files, "allowed_files", lambda: 80)
    monkeypatch.setattr("llava_mcore.data.storage.shard_reader.OPEN_SHARDS", OpenShards())
    data = DataConfig(path=blend, num_workers=0, seq_length=64, shuffle_buffer_size=10_000, num_streams=8)
    loader = TrainLoader(data, load_assets(tmp_path / "hf"), micro_batch_size=1, dp_rank=0, dp_size=1, seed=1)
    most = 0
    for _ in range(120):
        next(loader)
        found = open_files(tmp_path)
        assert len(set(found)) == len(found) and not any(name.endswith(".idx") for name in found)
        most = max(most, len(found))
    assert most == 20  # a quarter; before, up to two of every shard


def test_the_limit_is_raised_as_far_as_the_system_lets_us() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lower = min(256, soft - 1)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lower, hard))
        assert allowed_files() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] > lower
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_when_others_use_up_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [EPath(dataset(tmp_path / "a", 24) / f"{shard:06d}.tar") for shard in range(24)]
    shards, opened, left = OpenShards(), tar_files.OpenShard, 20

    def scarce(path: EPath) -> tar_files.OpenShard:
        if len(shards) >= left:
            raise OSError(errno.EMFILE, "Too many open files", str(path))
        return opened(path)

    monkeypatch.setattr(tar_files, "OpenShard", scarce)
    for path in paths:
        shards.get(path)
    assert len(shards) <= left
    left = 0
    with pytest.raises(DataError, match=r"000000\.tar cannot be opened: Too many open files; .*ulimit -n.*num_streams"):
        shards.get(paths[0])
