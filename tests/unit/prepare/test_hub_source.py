"""A dataset of the Hugging Face hub as a source, `hf://`: a server of this machine answers as the hub does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

import fsspec
import pytest
from huggingface_hub import HfFileSystem, constants

from llava_mcore.errors import DataError
from llava_mcore.prepare.sources.fetch import fetch

REPO, COMMIT = "org/talk", "1" * 40
REVISIONS = ("main", "refs/convert/parquet", COMMIT)


class Hub(ThreadingHTTPServer):
    """Serves one dataset repository."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files: dict[str, bytes] = {}
        self.fetched: list[str] = []


class Answers(BaseHTTPRequestHandler):
    """The few routes that HfFileSystem uses."""

    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith(f"/datasets/{REPO}/resolve/"):
            self._file(next(name for name in self.server.files if path.endswith(f"/{name}")))
        elif "/tree/" in path and path.startswith(f"/api/datasets/{REPO}/"):
            below = next(path.partition(f"/tree/{name}")[2] for name in REVISIONS if f"/tree/{name}" in path).strip("/")
            names = [name for name in self.server.files if name.startswith(f"{below}/" if below else "")]
            folders = {str(p) for name in names for p in PurePosixPath(name).parents if str(p) not in (".", below)}
            listed = [{"type": "directory", "path": p, "size": 0, "oid": "0"} for p in sorted(folders)]
            listed += [self._entry(name) for name in names]
            self._json(listed if listed else {"error": "not found"}, 200 if listed else 404)
        elif path == f"/api/datasets/{REPO}" or path.startswith(f"/api/datasets/{REPO}/revision/"):
            self._json({"id": REPO, "sha": COMMIT, "private": False, "siblings": [], "tags": [], "downloads": 0})
        else:
            self._json({"error": "not found"}, 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self._json([self._entry(name) for name in self.server.files if name in unquote(body)])

    def _entry(self, name: str) -> dict[str, Any]:
        data = self.server.files[name]
        return {"type": "file", "path": name, "size": len(data), "oid": f"{hash(data):x}"}

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(json.dumps(value).encode(), status)

    def _file(self, name: str) -> None:
        if self.command == "GET":
            self.server.fetched.append(name)
        self._send(self.server.files[name], 200, {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT})

    def _send(self, data: bytes, status: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    fresh = HfFileSystem(endpoint=endpoint, token=False, skip_instance_cache=True)

    def url_to_fs(url: str) -> tuple[HfFileSystem, str]:
        fresh.invalidate_cache()
        return fresh, fresh._strip_protocol(url)

    monkeypatch.setattr(fsspec.core, "url_to_fs", url_to_fs)
    yield server
    server.shutdown()
    server.server_close()


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
