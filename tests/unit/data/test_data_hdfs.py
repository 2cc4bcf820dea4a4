"""Shards in HDFS, read by multi-storage-client through fsspec: the batches of the same folder, and errors in time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from megatron.energon.epathlib import EPath

from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.storage.dataset_path import check_dataset, fingerprint
from llava_mcore.errors import DataError
from tests.helpers.hdfs_server import JARS, HdfsServer
from tests.helpers.webhdfs import WebHdfs
from tests.unit.data.test_data_loader import assert_equal, open_loader, take
from tests.unit.data.test_data_shards import make_vqa

pytest_plugins = ("tests.helpers.llava_fixtures",)

Configure = Callable[..., None]


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """Write the profile as the documentation shows it, except for host, port and the place of the cache."""
    documented = (Path(__file__).parents[3] / "docs" / "object_stores.md").read_text(encoding="utf-8")

    def write(**options: Any) -> None:
        settings = yaml.safe_load(documented.split("## HDFS")[1].split("```yaml")[1].split("```")[0])
        profile = {**settings["profiles"]["hdfs"]["storage_provider"]["options"], "host": "127.0.0.1", **options}
        chosen = {name: value for name, value in profile.items() if value is not None}
        settings["profiles"]["hdfs"]["storage_provider"]["options"] = chosen
        settings["profiles"]["hdfs"]["retry"] = {"attempts": 2, "delay": 0.1, "backoff_multiplier": 1}
        settings["cache"]["location"] = str(tmp_path / "cache")
        file = tmp_path / "msc.yaml"
        file.write_text(yaml.safe_dump(settings), encoding="utf-8")
        monkeypatch.setenv("MSC_CONFIG", str(file))
        monkeypatch.setattr("multistorageclient.shortcuts._STORAGE_CLIENT_CACHE", {})
        monkeypatch.setattr("multistorageclient.shortcuts._PATH_MAPPING_CACHE", {})

    return write


def test_shards_in_hdfs(tmp_path: Path, assets: Assets, configure: Configure) -> None:
    root = tmp_path / "root"
    local = root / "data" / "digits"
    make_vqa(local, shards=3, samples=16)
    with WebHdfs(root) as files:
        configure(port=files.port)
        assert check_dataset("msc://hdfs/digits") == [EPath("msc://hdfs/digits")]
        assert fingerprint("msc://hdfs/digits") == fingerprint(local)
        folder = open_loader(local, assets)
        remote = open_loader("msc://hdfs/digits", assets, workers=2)
        files.failures["000001.tar"] = 1  # a connection that breaks is tried again
        assert_equal(take(remote, 20), take(folder, 20))
        remote.close()
        assert files.failures["000001.tar"] == 0
        # Shards are read in pieces of the cache: at most once by each of the two loader processes, which may miss a
        # piece at the same moment, and not at all by a loader that comes later.
        read = Counter(entry for entry in files.opened if entry[0].endswith(".tar"))
        assert len(read) == 3 and max(read.values()) <= 2
        files.opened.clear()
        later = open_loader("msc://hdfs/digits", assets, workers=2)
        assert_equal(take(later, 20), take(open_loader(local, assets), 20))
        later.close()
        assert not [entry for entry in files.opened if entry[0].endswith(".tar")]
        with pytest.raises(DataError, match="gone does not exist"):
            check_dataset("msc://hdfs/gone")
    with pytest.raises(DataError, match=r"(?s)msc://hdfs/digits cannot be read.*webhdfs:/data/digits"):
        check_dataset("msc://hdfs/digits")


def test_a_profile_that_fsspec_cannot_use(configure: Configure) -> None:
    configure(protocol="no-such-protocol")
    with pytest.raises(DataError, match=r"(?s)msc://hdfs/digits cannot be read.*no-such-protocol"):
        check_dataset("msc://hdfs/digits")


def test_writing_and_listing(tmp_path: Path, configure: Configure) -> None:
    """Every operation of the provider, on a file system that fsspec has in memory."""
    import fsspec
    import multistorageclient as msc

    configure(protocol="memory", base_path="/store")
    client, _ = msc.resolve_storage_client("msc://hdfs/a")
    memory = fsspec.filesystem("memory")
    for name in ("b/two.bin", "a/one.bin", "a/deep/three.bin"):
        client.write(name, name.encode())
    assert memory.cat_file("/store/a/one.bin") == b"a/one.bin" and client.read("a/one.bin") == b"a/one.bin"
    assert [item.key for item in client.list()] == ["a/deep/three.bin", "a/one.bin", "b/two.bin"]
    found = {item.key: item.type for item in client.list(path="a", include_directories=True)}
    assert found == {"a/deep": "directory", "a/one.bin": "file"}
    client.download_file("a/one.bin", str(tmp_path / "x" / "one.bin"))
    assert (tmp_path / "x" / "one.bin").read_bytes() == b"a/one.bin"
    client.copy("a/one.bin", "c/copy.bin")
    client.delete("a/one.bin")
    assert not client.is_file("a/one.bin") and client.read("c/copy.bin") == b"a/one.bin"
    with pytest.raises(FileNotFoundError):
        client.read("a/one.bin")
    memory.rm("/store", recursive=True)


@pytest.mark.long
@pytest.mark.skipif(JARS is None, reason="HADOOP_JARS names no folder of Hadoop's jars (tests/helpers/hdfs_server.py)")
def test_shards_in_a_real_hdfs(tmp_path: Path, assets: Assets, configure: Configure) -> None:
    """Hadoop's own name node and data node, and the client of hdfs-native."""
    pytest.importorskip("hdfs_native")
    import multistorageclient as msc

    local = tmp_path / "digits"
    make_vqa(local, shards=3, samples=16)
    (tmp_path / "hdfs").mkdir()
    with HdfsServer(tmp_path / "hdfs") as server:
        configure(protocol="hdfs", base_path="/data", port=server.port, user=None)
        client, _ = msc.resolve_storage_client("msc://hdfs/digits")
        for file in sorted(path for path in local.rglob("*") if path.is_file()):
            client.upload_file(f"digits/{file.relative_to(local)}", str(file))
        assert fingerprint("msc://hdfs/digits") == fingerprint(local)
        # In this process: a loader with two processes did not end with this client.
        folder, remote = open_loader(local, assets), open_loader("msc://hdfs/digits", assets)
        assert_equal(take(remote, 20), take(folder, 20))
        remote.close()
        with pytest.raises(DataError, match="gone does not exist"):
            check_dataset("msc://hdfs/gone")
    with pytest.raises(DataError, match="msc://hdfs/digits cannot be read"):
        check_dataset("msc://hdfs/digits")
