"""A server of this machine that answers as the Hugging Face hub does, for `hf://` and `http://`."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

import fsspec
import pytest
from huggingface_hub import HfFileSystem, constants

REPO, COMMIT = "org/talk", "1" * 40
REVISIONS = ("main", "refs/convert/parquet", COMMIT)


class Hub(ThreadingHTTPServer):
    """Serves one dataset repository."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files: dict[str, bytes] = {}
        self.fetched: list[str] = []
        self.sent = 0
        """Bytes of files that were sent."""
        self.breaks: dict[str, tuple[int, int]] = {}
        """Byte of a file at which the connection breaks, and how often it still does."""
        self.takes_ranges = True


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
        data, headers = self.server.files[name], {"ETag": f'"{name} {hash(self.server.files[name])}"'}
        headers |= {"X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes" if self.server.takes_ranges else "none"}
        status, start, stop = 200, 0, len(data)
        if self.server.takes_ranges and (asked := self.headers.get("Range")):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            status, start, stop = 206, int(first), min(len(data), int(last or len(data)) + 1)
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        if self.command != "GET":
            self._send(data[start:stop], status, headers)
            return
        self.server.fetched.append(name)
        place, times = self.server.breaks.get(name, (0, 0))
        if times and start <= place < stop:
            self.server.breaks[name] = (place, times - 1)
            self._send(data[start:stop], status, headers, place - start)
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self._send(data[start:stop], status, headers)
        self.server.sent += stop - start

    def _send(self, data: bytes, status: int, headers: dict[str, str] | None = None, stop: int | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:stop])

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    fresh = HfFileSystem(endpoint=endpoint, token=False, skip_instance_cache=True)

    original = fsspec.core.url_to_fs

    def url_to_fs(url: str) -> tuple[Any, str]:
        if not url.startswith("hf://"):
            return original(url)
        fresh.invalidate_cache()
        return fresh, fresh._strip_protocol(url)

    monkeypatch.setattr(fsspec.core, "url_to_fs", url_to_fs)
    yield server
    server.shutdown()
    server.server_close()
