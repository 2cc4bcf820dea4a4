"""Data in an object store: the same batches as from a folder, and one message in time when it fails."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from megatron.energon.cli.main import main as energon
from megatron.energon.epathlib import EPath

from llava_mcore.cli.dedup import main as dedup
from llava_mcore.config.load import load_run_config, run_config_yaml
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.loader.loader_process import leave_out_of_collections, loader_process_init
from llava_mcore.data.storage.dataset_path import check_dataset, fingerprint
from llava_mcore.data.storage.remote import renew_connections
from llava_mcore.errors import DataError
from tests.helpers.encoding import tiles
from tests.helpers.object_store import ACCESS_KEY, ObjectStore
from tests.unit.data.test_data_loader import assert_equal, open_loader, take
from tests.unit.data.test_data_shards import make_vqa, picture

pytest_plugins = ("tests.helpers.llava_fixtures",)

BLEND = """
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    blend:
      - {{weight: 1, path: {}}}
      - {{weight: 1, path: {}}}
"""
Configure = Callable[..., None]


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bucket")
    make_vqa(root / "digits", shards=3, samples=16)
    (root / "blend.yaml").write_text(BLEND.format("./digits", "msc://digits/digits"), encoding="utf-8")
    (root / "wrong.yaml").write_text(BLEND.format("./digits", "s3://bucket/digits"), encoding="utf-8")
    return root


@pytest.fixture
def store(bucket: Path) -> Iterator[ObjectStore]:
    with ObjectStore(bucket) as running:
        yield running


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """Write multi-storage-client's configuration, as the documentation shows it except for shorter time limits."""

    documented = (Path(__file__).parents[3] / "docs" / "object_stores.md").read_text(encoding="utf-8")

    def write(store: ObjectStore, *, key: str = ACCESS_KEY, cache: bool = True, **options: Any) -> None:
        settings = yaml.safe_load(documented.split("```yaml")[1].split("```")[0])
        settings["profiles"] = {"digits": settings["profiles"]["shards"]}
        settings["path_mapping"] = {"http://shards.example/": "msc://digits/"}
        settings["cache"]["location"] = str(tmp_path / "cache")
        profile = settings["profiles"]["digits"]
        limits = {"connect_timeout": 1, "read_timeout": 1, "retries": {"mode": "standard", "total_max_attempts": 1}}
        profile["storage_provider"]["options"] |= {"base_path": "bucket", "endpoint_url": store.endpoint}
        profile["storage_provider"]["options"] |= limits | options
        profile["retry"] = {"attempts": 2, "delay": 0.1, "backoff_multiplier": 1}
        profile["caching_enabled"] = cache
        if store.plain:
            del profile["credentials_provider"]
        else:
            profile["credentials_provider"]["options"] = {"access_key": key, "secret_key": "secret"}
        file = tmp_path / "msc.yaml"
        file.write_text(yaml.safe_dump(settings), encoding="utf-8")
        monkeypatch.setenv("MSC_CONFIG", str(file))
        # The client is kept for each profile of the process; every test has its own.
        monkeypatch.setattr("multistorageclient.shortcuts._STORAGE_CLIENT_CACHE", {})
        monkeypatch.setattr("multistorageclient.shortcuts._PATH_MAPPING_CACHE", {})

    return write


def test_url_survives_configuration_files(tmp_path: Path) -> None:
    run = load_run_config(flags={"data.path": "msc://digits/blend.yaml"})
    assert run.data.path == "msc://digits/blend.yaml"
    (tmp_path / "run.yaml").write_text(run_config_yaml(run), encoding="utf-8")
    assert load_run_config(tmp_path / "run.yaml") == run
    assert load_run_config(flags={"data.path": "~/x"}).data.path == Path.home() / "x"


@pytest.mark.parametrize("workers", [0, 2])
def test_same_batches_as_from_the_folder(
    bucket: Path, assets: Assets, store: ObjectStore, configure: Configure, workers: int
) -> None:
    """An object store gives the batches of the same folder, also after a resume."""
    configure(store)
    local = open_loader(bucket / "digits", assets)
    remote = open_loader("msc://digits/digits", assets, workers=workers)
    assert_equal(take(remote, 30), take(local, 30))
    state = remote.state()
    remote.close()
    # The position does not depend on where the data is.
    resumed = open_loader(bucket / "digits", assets, saved=[state])
    assert_equal(take(resumed, 5), take(local, 5))


def test_every_kind_of_url(bucket: Path, store: ObjectStore, configure: Configure) -> None:
    """Datasets and blends are found by every kind of URL, with the fingerprint of the folder."""
    configure(store)
    leaf = EPath("msc://digits/digits")
    assert check_dataset("msc://digits/digits") == [leaf]
    assert check_dataset("msc://digits/blend.yaml") == [leaf]
    assert check_dataset("http://shards.example/digits") == [leaf], "mapped to the profile"
    assert fingerprint("msc://digits/digits") == fingerprint(bucket / "digits")
    local_blend = bucket.parent / "blend.yaml"
    local_blend.write_text(BLEND.format(bucket / "digits", "msc://digits/digits"), encoding="utf-8")
    assert check_dataset(local_blend) == [bucket / "digits", leaf]
    lines = bucket / "lines.jsonl"
    lines.write_text('{"messages": []}\n', encoding="utf-8")
    local_blend.write_text(BLEND.format("msc://digits/lines.jsonl", "msc://digits/digits"), encoding="utf-8")
    with pytest.raises(DataError, match="do not belong together; index it with"):
        check_dataset(local_blend)
    energon(["prepare", str(lines)], standalone_mode=False)
    assert check_dataset(local_blend) == [EPath("msc://digits/lines.jsonl"), leaf]


def test_duplicates_in_a_store(bucket: Path, store: ObjectStore, configure: Configure, tmp_path: Path) -> None:
    """A blend with the same data from the folder and from the store; what is in a store cannot be excluded."""
    configure(store)
    flags = ["--data-path", "msc://digits/blend.yaml", "--out", str(tmp_path / "out"), "--num-workers", "0", "--exact"]
    assert dedup(flags) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "duplicates.jsonl").read_text().splitlines()]
    assert len(rows) >= 48 and all("msc://digits/digits" in row["duplicate"]["dataset"] for row in rows)
    assert dedup([*flags, "--exclude"]) == 2


def test_plain_web_server_with_ranges(bucket: Path, assets: Assets, configure: Configure) -> None:
    """It lists nothing and knows no keys; an unsigned S3 profile reads it."""
    with ObjectStore(bucket, plain=True) as web:
        configure(web, signature_version="UNSIGNED", s3={"addressing_style": "path"})
        loader = open_loader("msc://digits/digits", assets)
        assert_equal(take(loader, 12), take(open_loader(bucket / "digits", assets), 12))
        with pytest.raises(DataError, match="msc://digits/none does not exist"):
            check_dataset("msc://digits/none")


def test_flaky_server_still_gives_the_batches(
    bucket: Path, assets: Assets, store: ObjectStore, configure: Configure
) -> None:
    configure(store, retries={"mode": "standard", "total_max_attempts": 3})
    flaky = [f"digits/{name}" for name in (".nv-meta/split.yaml", "000000.tar.idx", "000001.tar")]
    store.failures.update(dict.fromkeys(flaky, 2))
    loader = open_loader("msc://digits/digits", assets, num_streams=1)
    assert_equal(take(loader, 24), take(open_loader(bucket / "digits", assets, num_streams=1), 24))
    assert not +store.failures, "all of them failed first"


@pytest.mark.parametrize("workers", [0, 1])
def test_server_that_dies_ends_in_one_message_in_time(
    assets: Assets, store: ObjectStore, configure: Configure, workers: int
) -> None:
    configure(store)
    loader = open_loader("msc://digits/digits", assets, workers=workers)
    store.__exit__()
    begin = time.monotonic()
    with pytest.raises(DataError, match=r"^msc://digits/digits cannot be read: .*endpoint URL"):
        take(loader, 24)
    with pytest.raises(DataError, match=r"^msc://digits/digits cannot be read: .*endpoint URL"):
        check_dataset("msc://digits/digits")
    assert time.monotonic() - begin < 30


def test_server_that_hangs_ends_in_one_message_in_time(store: ObjectStore, configure: Configure) -> None:
    configure(store)
    store.silent.set()
    begin = time.monotonic()
    with pytest.raises(DataError, match=r"^msc://digits/digits cannot be read: .*ReadTimeout"):
        check_dataset("msc://digits/digits")
    assert time.monotonic() - begin < 30


def test_forked_process_shares_no_connection(store: ObjectStore, configure: Configure) -> None:
    configure(store)
    split = EPath("msc://digits/digits/.nv-meta/split.yaml")
    split.size()
    parents = set(store.clients)
    loader_process_init()
    leave_out_of_collections()
    forked = multiprocessing.get_context("fork").Process(target=lambda: (renew_connections(), split.size()))
    store.clients.clear()
    forked.start()
    forked.join()
    assert forked.exitcode == 0 and store.clients and not store.clients & parents
    split.size()
    assert store.clients & parents, "the parent continues with its own"


def test_loader_process_that_hangs_longer_than_allowed(
    assets: Assets, store: ObjectStore, configure: Configure
) -> None:
    """It ends in one message after data.timeout."""
    configure(store, read_timeout=60)
    loader = open_loader("msc://digits/digits", assets, workers=1, timeout=1)
    store.silent.set()
    with pytest.raises(DataError, match=r"no batch came within data\.timeout = 1 seconds"):
        next(loader)


def test_what_is_wrong_is_said(bucket: Path, store: ObjectStore, configure: Configure) -> None:
    def message(path: str) -> str:
        with pytest.raises(DataError) as caught:
            check_dataset(path)
        return str(caught.value)

    configure(store)
    assert "msc://digits/none does not exist" in message("msc://digits/none")
    other = message("msc://other/x")
    assert 'Profile "other" not found' in other and "docs/object_stores.md" in other
    assert 'Unknown URL "ftp://a/b"' in message("ftp://a/b")
    assert "begin with msc://" in message("msc://digits/wrong.yaml")
    configure(store, key="wrong")
    assert "PermissionError: Permission denied to HEAD" in message("msc://digits/digits")
    configure(store, cache=False)
    assert "caching_enabled: true" in message("msc://digits/digits")


def test_incomplete_upload(bucket: Path, store: ObjectStore, configure: Configure, tmp_path: Path) -> None:
    """Every file that is missing or cut off is listed."""
    store.root = Path(shutil.copytree(bucket, tmp_path / "copy"))
    configure(store)
    folder = store.root / "digits"
    (folder / "000000.tar.idx").write_bytes(b"")
    (folder / "000001.tar").write_bytes((folder / "000001.tar").read_bytes()[:4000])
    (folder / "000002.tar").unlink()
    with pytest.raises(DataError, match=r"\(3 problems\)") as caught:
        check_dataset("msc://digits/digits")
    for text in (
        "000000.tar.idx lists -1 samples, .nv-meta/.info.json 16",
        "000001.tar has 4000 bytes, but its index needs",
        "000002.tar and its .tar.idx are not both there",
    ):
        assert text in str(caught.value)
    (folder / ".nv-meta" / "index.uuid").unlink()
    with pytest.raises(DataError, match=r"is not complete \(index\.uuid missing\)"):
        check_dataset("msc://digits/digits")


def make_lazy(root: Path, store: str, *, spoil: bool = False) -> Path:
    """A jsonl whose samples name images, half with two of them, and the blend that says where these are."""
    (root / "pictures" / "sub").mkdir(parents=True)
    lines = []
    for number in range(16):
        names = [f"sub/{number}.jpg", *([f"{number}.jpg"] if number % 2 else [])]
        for place, name in enumerate(names):
            (root / "pictures" / name).write_bytes(picture(number + place))
        question = "Which digit is <image>?" if len(names) == 1 else "Which digits are <image> and <image>?"
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": f"It is {number}."}]
        lines.append({"messages": messages, "images": names})
    if spoil:
        (root / "pictures" / "sub" / "3.jpg").unlink()
        lines[5]["images"] = ["../secret.jpg", "5.jpg"]
        lines[7]["images"] = "7.jpg"
    (root / "talk.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    energon(["prepare", str(root / "talk.jsonl")], standalone_mode=False)
    blend = root / "lazy.yaml"
    entry = f"{{weight: 1, path: talk.jsonl, aux: {{images: '{store}'}}}}"
    blend.write_text(BLEND.split("      -")[0] + f"      - {entry}\n", encoding="utf-8")
    return blend


@pytest.mark.parametrize("where", ["filesystem://pictures", "filesystem+msc://digits/pictures", "./prepared"])
def test_pictures_that_samples_only_name(assets: Assets, configure: Configure, tmp_path: Path, where: str) -> None:
    blend = make_lazy(tmp_path / "lazy", where)
    shutil.copytree(tmp_path / "lazy" / "pictures", tmp_path / "bucket" / "pictures")
    with tarfile.open(_folder(tmp_path / "lazy" / "prepared") / "000000.tar", "w") as tar:
        for file in sorted((tmp_path / "lazy" / "pictures").rglob("*.jpg")):
            tar.add(file, str(file.relative_to(tmp_path / "lazy" / "pictures")))
    arguments = ["--non-interactive", "--split-ratio", "1,0,0", "--skip-dataset-yaml", "--num-workers", "1"]
    energon(["prepare", str(tmp_path / "lazy" / "prepared"), *arguments], standalone_mode=False)
    with ObjectStore(tmp_path / "bucket") as store:
        configure(store)
        for batch in take(open_loader(blend, assets, seq_length=128, packing=True), 4):
            assert not batch.skipped
            pictures = iter(batch.media["pixel_values"])
            for key in batch.sample_keys:
                number = int(key)
                for place in range(2 if number % 2 else 1):
                    assert torch.equal(next(pictures), tiles(assets.images, [picture(number + place)])[0])
            assert next(pictures, None) is None


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_named_pictures_that_are_not_there(assets: Assets, tmp_path: Path) -> None:
    loader = open_loader(make_lazy(tmp_path, "filesystem://pictures", spoil=True), assets, num_streams=1, shuffle=0)
    reasons = sorted({str(skip.reason) for batch in take(loader, 8) for skip in batch.skipped})
    assert reasons == [
        "\"images\" must be a list of names, found '7.jpg'",
        "the image '../secret.jpg' is outside of its store; names must be relative to it",
        f"the image 'sub/3.jpg' is not in {tmp_path / 'pictures'}",
    ]
    (tmp_path / "lazy.yaml").write_text(BLEND.split("      -")[0] + "      - {weight: 1, path: talk.jsonl}\n")
    with pytest.raises(DataError, match=r"names 'sub/15.jpg', but the dataset has no store of images \(aux:"):
        next(open_loader(tmp_path / "lazy.yaml", assets, num_streams=1, shuffle=0))


@pytest.mark.parametrize("fault", ["dead", "refuses"])
def test_store_of_pictures_that_fails_ends_the_run(
    assets: Assets, configure: Configure, tmp_path: Path, fault: str
) -> None:
    blend = make_lazy(tmp_path / "bucket", "filesystem+msc://digits/pictures")
    with ObjectStore(tmp_path / "bucket") as store:
        configure(store, key="wrong" if fault == "refuses" else ACCESS_KEY)
        loader = open_loader(blend, assets)
        if fault == "dead":
            store.__exit__()
        with pytest.raises(DataError, match=r"msc://digits/pictures cannot be read: "):
            next(loader)
