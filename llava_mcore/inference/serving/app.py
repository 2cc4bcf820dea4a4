"""The server: transformers' handler of chat requests after our checks, under OpenAI's addresses."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from llava_mcore.compat.transformers_serving import PinnedHandler
from llava_mcore.inference.serving.requests import RequestError, ServedModel, check_chat

logger = logging.getLogger(__name__)

DISCARDED = 8
"""The rest of a request that is too large is read and discarded, up to this many times the limit, so that the client
sees the answer; then the connection is closed."""


def build_app(handler: PinnedHandler, model: ServedModel, *, max_request_bytes: int) -> FastAPI:
    """Return the app. It has the chat completions, the list of models and a health check, nothing else: transformers'
    own app also loads other models on request."""

    # The engine ends with the app.
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        handler.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    started = int(time.time())

    # Every error is an object as OpenAI's clients expect it.
    @app.exception_handler(RequestError)
    async def refuse(_: Request, error: RequestError) -> JSONResponse:
        return _error(str(error), error.status)

    @app.exception_handler(HTTPException)
    async def refuse_as_asked(_: Request, error: HTTPException) -> JSONResponse:
        return _error(str(error.detail), error.status_code)

    @app.exception_handler(ClientDisconnect)
    async def client_gone(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # as nginx logs it; no one receives it

    @app.exception_handler(Exception)
    async def report(_: Request, error: Exception) -> JSONResponse:
        logger.error("a request failed: %s: %s", type(error).__name__, error)
        return _error(f"the model could not answer: {type(error).__name__}: {error}", 500)

    # The three addresses.
    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = _parsed(await _read(request, max_request_bytes))
        body = await run_in_threadpool(check_chat, body, model)  # it decodes images
        return await handler.answer(body, uuid.uuid4().hex)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {"id": model.name, "object": "model", "created": started, "owned_by": "llava_mcore"}
        return {"object": "list", "data": [entry]}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


def _error(message: str, status: int) -> JSONResponse:
    """Return an error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status_code=status)


async def _read(request: Request, most_bytes: int) -> bytes:
    """Return a request's body. RequestError if it is larger than `most_bytes` bytes."""
    body, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > DISCARDED * most_bytes:
            break
        if size > most_bytes:
            body.clear()
        else:
            body += chunk
    if size > most_bytes:
        raise RequestError(
            f"the request is larger than {most_bytes} bytes (--max-request-bytes); send smaller images", 413
        )
    return bytes(body)


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request is not valid JSON: {error}") from error
