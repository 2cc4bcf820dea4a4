"""A folder on loopback as HDFS serves one over WebHDFS: the status of files, folders, and byte ranges with a redirect.

The redirect is that of HDFS, where another machine than the one that is asked has the bytes.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

PREFIX = "/webhdfs/v1"


class WebHdfs:
    """Serves ROOT. `failures`: how many of the next requests for a file (or of all: "") close without an answer."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.failures: Counter[str] = Counter()
        self.opened: list[tuple[str, int, int | None]] = []
        self.stopped = False
        files = self

        class Handler(_Handler):
            pass

        Handler.files = files
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped = True  # connections that are kept open outlive the server
        self._server.shutdown()
        self._server.server_close()


def _status(path: Path, name: str) -> dict[str, Any]:
    stat = path.stat()
    kind = "DIRECTORY" if path.is_dir() else "FILE"
    size = 0 if path.is_dir() else stat.st_size
    return {"pathSuffix": name, "type": kind, "length": size, "modificationTime": int(stat.st_mtime * 1000)}


class _Handler(BaseHTTPRequestHandler):
    files: WebHdfs
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {key.lower(): value[0] for key, value in parse_qs(url.query).items()}
        name = unquote(url.path).removeprefix(PREFIX).lstrip("/")
        path = self.files.root / name
        if self.files.stopped or self.files.failures[path.name] > 0:
            self.files.failures[path.name] -= 1
            self.close_connection = True
            return
        if not path.exists():
            what = {"exception": "FileNotFoundException", "message": f"File does not exist: /{name}"}
            self._send(404, json.dumps({"RemoteException": what}).encode())
        elif query["op"] == "GETFILESTATUS":
            self._send(200, json.dumps({"FileStatus": _status(path, "")}).encode())
        elif query["op"] == "LISTSTATUS":
            entries = [_status(p, p.name) for p in sorted(path.iterdir())] if path.is_dir() else [_status(path, "")]
            self._send(200, json.dumps({"FileStatuses": {"FileStatus": entries}}).encode())
        elif query["op"] == "OPEN" and "redirected" not in query:
            self.send_response(307)
            self.send_header("Location", f"http://127.0.0.1:{self.files.port}{self.path}&redirected=true")
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            start, length = int(query.get("offset", 0)), query.get("length")
            self.files.opened.append((name, start, None if length is None else int(length)))
            data = path.read_bytes()[start:]
            self._send(200, data if length is None else data[: int(length)])

    def _send(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass
