"""A dataset of the Hugging Face hub as a source, `hf://`: a server of this machine answers as the hub does."""

from __future__ import annotations

from pathlib import Path

import pytest

from llava_mcore.errors import DataError
from llava_mcore.prepare.sources.fetch import fetch
from tests.helpers.hub_server import REPO, Hub

pytest_plugins = ("tests.helpers.hub_server",)


@pytest.mark.parametrize("revision", ["", "@main", "@refs/convert/parquet"])
def test_files_of_a_dataset_are_fetched(hub: Hub, tmp_path: Path, revision: str) -> None:
    """All files of a folder, at a revision too; and only what has changed is fetched again."""
    hub.files |= {"data/train.jsonl": b'{"a": 1}\n', "data/images/a.png": b"png", "README.md": b"text"}
    url = f"hf://datasets/{REPO}{revision}/data"
    place = fetch(url, tmp_path)
    found = {str(p.relative_to(place)): p.read_bytes() for p in place.rglob("*") if p.is_file()}
    assert {name: data for name, data in found.items() if not name.startswith(".")} == {
        "train.jsonl": b'{"a": 1}\n',
        "images/a.png": b"png",
    }
    hub.fetched.clear()
    hub.files["data/train.jsonl"] = b'{"a": 22}\n'
    assert fetch(url, tmp_path) == place and hub.fetched == ["data/train.jsonl"]
    assert (place / "train.jsonl").read_bytes() == b'{"a": 22}\n'


def test_a_dataset_that_is_not_there(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="hf://datasets/org/other/data"):
        fetch("hf://datasets/org/other/data", tmp_path)
