"""The page of `demo` without Gradio and without a browser: what it sends, and what it shows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from llava_mcore.cli.serve import MAX_REQUEST_BYTES
from llava_mcore.inference.serving import page
from tests.helpers.world import free_port

Answer = Callable[[dict[str, Any], list[dict[str, Any]]], Iterator[str]]


def entry(role: str, *texts: str) -> dict[str, Any]:
    """Return an entry of Gradio's history."""
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


def question(text: str) -> dict[str, Any]:
    """Return what Gradio's text box gives."""
    return {"text": text, "files": []}


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Answer:
    """What the page calls for an answer, from a page in which Gradio does nothing."""

    def nothing(**_: Any) -> None:
        return None

    gradio = SimpleNamespace(ChatInterface=lambda called, **_: called, Chatbot=nothing, MultimodalTextbox=nothing)
    monkeypatch.setitem(sys.modules, "gradio", gradio)
    return page.build_page(f"http://localhost:{free_port()}/v1", [])  # type: ignore[return-value]


def test_questions_without_an_answer_are_not_sent_again() -> None:
    first = [entry("user", "Which digit?"), entry("assistant", "seven")]
    refused = [
        entry("user", "What is it?"),
        entry("assistant", f"{page.NOTICE} refused the question (400): no image"),
    ]
    broken = [entry("user", "Even?"), entry("assistant", f"It is\n\n{page.NOTICE} failed: out of memory")]
    # An image and its text may be two entries.
    file = {"role": "user", "content": [{"type": "file", "file": {"path": "a.jpg"}}]}
    second = [file, {"role": "user", "content": "And this?"}, {"role": "assistant", "content": "one"}]
    interrupted = [entry("user", "Are you there?")]
    assert page.answered([*first, *refused, *second, *broken, *interrupted]) == [*first, *second]
    assert page.answered([file, *refused]) == []


def test_the_conversation_continues_after_a_failure(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    (down,) = answer(question("Which digit?"), [])
    assert "does not answer" in down
    sent: list[list[str]] = []

    def ask(server: str, messages: list[dict[str, Any]]) -> Iterator[str]:
        sent.append([part["text"] for message in messages for part in message["content"]])
        yield "It is"
        if len(sent) == 2:
            raise page.AnswerFailure("failed: out of memory")
        yield " seven"

    monkeypatch.setattr(page, "ask", ask)
    history: list[dict[str, Any]] = [entry("user", "Which digit?"), entry("assistant", down)]
    for text in ("Is it odd?", "Is it prime?", "Is it even?"):
        *_, shown = answer(question(text), history)
        history += [entry("user", text), entry("assistant", shown)]
    assert sent == [
        ["Is it odd?"],
        ["Is it odd?", "It is seven", "Is it prime?"],
        ["Is it odd?", "It is seven", "Is it even?"],
    ]
    assert history[5]["content"][0]["text"] == f"It is\n\n{page.NOTICE} failed: out of memory"


def test_a_picture_that_the_page_takes_fits_into_a_request() -> None:
    text_and_json = 1 << 20
    assert page.MOST_BYTES * 4 / 3 + text_and_json < MAX_REQUEST_BYTES
