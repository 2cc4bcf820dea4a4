"""An object store on loopback: a folder served as S3 serves a bucket, with faults on demand."""

from __future__ import annotations

import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

ACCESS_KEY = "testkey"
PAGE = 1000


class ObjectStore:
    """Serves ROOT as the bucket `bucket`: GET, HEAD and byte ranges of objects, and listing (`plain`: only objects).

    `failures`: object -> how many of the next requests for it are answered with 503. `silent`: it accepts connections
    and never answers. `clients`: the ports that requests came from, one per connection.
    """

    def __init__(self, root: Path, *, plain: bool = False) -> None:
        self.root, self.plain = root, plain
        self.failures: Counter[str] = Counter()
        self.clients: set[int] = set()
        self.silent = threading.Event()
        self.stopped = threading.Event()
        store = self

        class Handler(_Handler):
            pass

        Handler.store = store
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()

    def listing(self, query: dict[str, list[str]]) -> bytes:
        """ListObjectsV2, one page, with a delimiter if asked for."""
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        names = sorted(str(p.relative_to(self.root)) for p in self.root.rglob("*") if p.is_file())
        names = [name for name in names if name.startswith(prefix)]
        folders = set()
        if delimiter:
            folders = {prefix + n[len(prefix) :].split("/")[0] + "/" for n in names if "/" in n[len(prefix) :]}
            names = [n for n in names if "/" not in n[len(prefix) :]]
        names = names[: int(query.get("max-keys", [str(PAGE)])[0])]
        contents = "".join(
            f"<Contents><Key>{escape(n)}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;e&quot;</ETag><Size>{(self.root / n).stat().st_size}</Size></Contents>"
            for n in names
        )
        common = "".join(f"<CommonPrefixes><Prefix>{escape(n)}</Prefix></CommonPrefixes>" for n in sorted(folders))
        return (
            '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>bucket</Name>'
            f"<IsTruncated>false</IsTruncated><KeyCount>{len(names) + len(folders)}</KeyCount>{contents}{common}"
            "</ListBucketResult>"
        ).encode()


class _Handler(BaseHTTPRequestHandler):
    store: ObjectStore
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve(body=True)

    def do_HEAD(self) -> None:
        self._serve(body=False)

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self, *, body: bool) -> None:
        store = self.store
        if store.silent.is_set():
            store.stopped.wait()
        if store.stopped.is_set():
            self.close_connection = True
            return
        url = urlsplit(self.path)
        bucket, _, name = unquote(url.path).lstrip("/").partition("/")
        store.clients.add(self.client_address[1])
        if not store.plain and f"Credential={ACCESS_KEY}/" not in self.headers.get("Authorization", ""):
            self._answer(403, b"<Error><Code>InvalidAccessKeyId</Code><Message>no such key</Message></Error>", body)
        elif store.failures[name] > 0:
            store.failures[name] -= 1
            self._answer(503, b"<Error><Code>SlowDown</Code><Message>later</Message></Error>", body)
        elif bucket == "bucket" and not name and not store.plain:
            self._answer(200, store.listing(parse_qs(url.query)), body)
        elif bucket == "bucket" and name and (store.root / name).is_file():
            self._object(store.root / name, body)
        else:
            self._answer(404, b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>", body)

    def _object(self, file: Path, body: bool) -> None:
        data = file.read_bytes()
        wanted = self.headers.get("Range")
        if wanted is None:
            self._answer(200, data, body)
            return
        first, last = wanted.removeprefix("bytes=").split("-")
        start, end = int(first), min(int(last or len(data) - 1), len(data) - 1)
        self._answer(206, data[start : end + 1], body, {"Content-Range": f"bytes {start}-{end}/{len(data)}"})

    def _answer(self, status: int, data: bytes, body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        always = {"Content-Length": str(len(data)), "ETag": '"e"', "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}
        for name, value in (always | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)
