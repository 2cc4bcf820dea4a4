"""The part of an MLflow server that a run uses. It can stop answering: it accepts connections and sends nothing."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

RUN_ID = "0123456789abcdef0123456789abcdef"


class MLflowServer:
    """A server on its own port, within a `with` block."""

    def __init__(self, *, answers: bool = True) -> None:
        self.answers = answers
        self.refuses = False
        """Whether it rejects metrics."""
        self.points: list[tuple[str, int, float]] = []
        """(name, step, value) of every metric."""
        self.ended = False
        self._release = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server._reply(self)

            def do_POST(self) -> None:
                server._reply(self)

            def do_PATCH(self) -> None:
                server._reply(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.uri = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> MLflowServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        self._release.set()
        self._server.shutdown()
        self._server.server_close()

    def _reply(self, request: BaseHTTPRequestHandler) -> None:
        content: dict[str, Any] = json.loads(request.rfile.read(int(request.headers.get("Content-Length", 0))) or b"{}")
        if not self.answers:
            self._release.wait()
            return
        status, reply = 200, self._answer(request.path, content)
        if self.refuses and "log-batch" in request.path:
            status, reply = 400, {"error_code": "INVALID_PARAMETER_VALUE", "message": "not wanted"}
        body = json.dumps(reply).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def _answer(self, path: str, content: dict[str, Any]) -> dict[str, Any]:
        info = {"run_id": RUN_ID, "run_uuid": RUN_ID, "experiment_id": "1", "status": "RUNNING"}
        if "get-by-name" in path:
            return {"experiment": {"experiment_id": "1", "name": "llava_mcore"}}
        if "log-batch" in path and not self.refuses:
            self.points += [(x["key"], x["step"], x["value"]) for x in content.get("metrics", [])]
        if "runs/update" in path:
            self.ended = self.ended or content.get("status") == "FINISHED"
            return {"run_info": info}
        return {"run": {"info": info, "data": {}}}
