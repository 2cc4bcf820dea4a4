"""A chat page in front of a server with OpenAI's interface; a program of its own: `python -P page.py --server URL …`.

Gradio needs a different version of Pillow than training does. So this file runs in an environment that has Gradio and
nothing else of ours, and imports nothing from the project. Only what builds the page imports Gradio, so that the tests
can import the rest in the project's own environment.
"""

from __future__ import annotations

import argparse
import base64
import json
import mimetypes
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    import gradio as gr

QUESTIONS = "questions.jsonl"
MOST_EXAMPLES = 8
SECONDS_TO_CONNECT, SECONDS_TO_ANSWER = 5, 600
MOST_BYTES = 20 << 20
"""Largest image: as base64 it has a third more, and a request may have 32 MiB (`serve --max-request-bytes`)."""
NOTICE = "⚠️ The server"
"""Begins what the page says when an answer failed."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell reports it."""


class AnswerFailure(Exception):
    """An answer that failed; the page shows NOTICE and this text."""


def main() -> int:
    """Show the page until Ctrl-C."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--server", required=True, help="address of the server, with /v1")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--examples", type=Path)
    args = parser.parse_args()
    page = build_page(args.server, [] if args.examples is None else examples(args.examples))
    try:
        page.launch(
            server_name=args.host, server_port=args.port, max_file_size=MOST_BYTES, footer_links=[],
            quiet=True, prevent_thread_lock=True, ssr_mode=False,
        )  # fmt: skip
    except OSError as error:
        print(f"error: {args.host}:{args.port} cannot be listened on: {error}; choose another --port", file=sys.stderr)
        return 2
    print(f"the page is at http://{args.host}:{args.port}; Ctrl-C ends it", flush=True)
    threading.Event().wait()  # Gradio's own waiting would print a line after Ctrl-C, and end with code 0
    return 0


def build_page(server: str, examples: list[dict[str, Any]]) -> gr.Blocks:
    """Return the page. `examples`: example questions with their images, as Gradio takes them."""
    import gradio as gr

    def answer(message: dict[str, Any], history: list[dict[str, Any]]) -> Iterator[str]:
        text = ""
        try:
            for piece in ask(server, [*map(_message, answered(history)), _asked(message)]):
                text += piece
                yield text
        except AnswerFailure as failure:
            yield f"{text}\n\n{NOTICE} {failure}".strip()

    return gr.ChatInterface(
        answer,
        multimodal=True,
        chatbot=gr.Chatbot(label="Conversation", height="65vh", buttons=["copy"]),
        title="llava_mcore",
        description="Upload an image and ask about it.",
        textbox=gr.MultimodalTextbox(file_types=["image"], file_count="multiple", placeholder="Your question"),
        examples=examples or None,
        run_examples_on_click=False,
        cache_examples=False,
        analytics_enabled=False,
        flagging_mode="never",
    )


def examples(folder: Path) -> list[dict[str, Any]]:
    """Return up to MOST_EXAMPLES of a folder's questions, evenly spaced. Its questions.jsonl was checked before."""
    lines = [json.loads(x) for x in (folder / QUESTIONS).read_text(encoding="utf-8").splitlines() if x.strip()]
    step = max(1, len(lines) // MOST_EXAMPLES)
    return [
        {"text": line["question"], "files": [str(folder / line["image"])]} for line in lines[::step][:MOST_EXAMPLES]
    ]


def _asked(message: dict[str, Any]) -> dict[str, Any]:
    images = [_image_part(Path(file)) for file in message["files"]]
    return {"role": "user", "content": [*images, {"type": "text", "text": message["text"]}]}


def answered(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of Gradio's history that have an answer of the model, with their questions.

    The server would read the page's own notice as the model's answer, and refuse a refused question again.
    """
    usable: list[dict[str, Any]] = []
    asked: list[dict[str, Any]] = []
    for entry in history:
        asked.append(entry)
        if entry["role"] == "assistant":
            usable += [] if any(NOTICE in part["text"] for part in _parts(entry) if part["type"] == "text") else asked
            asked = []
    return usable


def _parts(entry: dict[str, Any]) -> list[dict[str, Any]]:
    content = entry["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _message(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of Gradio's history as the server takes it."""
    parts = [
        _image_part(Path(part["file"]["path"])) if part["type"] == "file" else {"type": "text", "text": part["text"]}
        for part in _parts(entry)
    ]
    return {"role": entry["role"], "content": parts}


def _image_part(file: Path) -> dict[str, Any]:
    kind = mimetypes.guess_type(file.name)[0] or "image/unknown"
    url = f"data:{kind if kind.startswith('image/') else 'image/unknown'};base64,"
    return {"type": "image_url", "image_url": {"url": url + base64.b64encode(file.read_bytes()).decode()}}


def ask(server: str, messages: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the answer piece by piece.

    Raises:
        Failure: the server does not answer, or refuses.
    """
    timeout = httpx.Timeout(SECONDS_TO_ANSWER, connect=SECONDS_TO_CONNECT)
    body = {"messages": messages, "stream": True}
    try:
        with httpx.stream("POST", f"{server}/chat/completions", json=body, timeout=timeout) as answer:
            if answer.status_code != httpx.codes.OK:
                answer.read()
                raise AnswerFailure(_reason(answer))
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield _piece(line.removeprefix("data: "))
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise AnswerFailure(
            f"at {server} does not answer ({reason}). Start it: python -m llava_mcore serve --hf-dir …"
        ) from error


def _piece(event: str) -> str:
    if event.startswith('{"error"'):  # transformers does not escape what it puts in there
        raise AnswerFailure(f"failed: {event}")
    delta = json.loads(event)["choices"][0]["delta"]
    return delta.get("content") or ""


def _reason(answer: httpx.Response) -> str:
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):  # not one of our servers
        message = answer.text[:200]
    return f"refused the question ({answer.status_code}): {message}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
