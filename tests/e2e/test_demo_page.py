"""The page of `demo` in a real browser: an image is uploaded, a question asked, the answer seen."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.browser import BOT, ask, opened
from llava_mcore.cli.demo import OWN_PYTHON, main
from llava_mcore.errors import DataError
from llava_mcore.inference.serving.examples import check_examples
from tests.helpers.server import Started, serving, started
from tests.helpers.shards import jpeg
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.world import free_port

needs_page = pytest.mark.skipif(
    shutil.which("chromium") is None or not OWN_PYTHON.is_file(),
    reason="needs Debian's chromium (apt-get install chromium) and the page's environment (make page)",
)
PAGE = r"the page is at (http://\S+);"
FAILED = "⚠️"
"""The page shows it before its own messages."""
DOWN = "http://localhost:9/v1"
"""Nothing listens there."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    make_hf_llava(folder / "tiny")
    # A random model does not end its answers, and one that is as long as allowed leaves no room for a second question.
    file = folder / "tiny" / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"exponential_decay_length_penalty": [8, 100.0]}))
    (folder / "exam").mkdir()
    for number in (1, 2):
        (folder / "exam" / f"{number}.jpg").write_bytes(jpeg(number))
    lines = [{"image": f"{number}.jpg", "question": f"Which digit is number {number}?"} for number in (1, 2)]
    (folder / "exam" / "questions.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "text.jpg").write_text("just a text file")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Started]:
    with serving(folder / "tiny", "--device", "cpu") as server:
        yield server


@needs_page
def test_a_picture_is_uploaded_and_the_answer_seen(folder: Path, server: Started) -> None:
    picture = folder / "exam" / "1.jpg"
    wanted = server.chat("Which digit?", picture.read_bytes(), max_tokens=None, temperature=None)
    wanted_text = wanted.json()["choices"][0]["message"]["content"]
    flags = ["--server", server.url, "--examples", folder / "exam", "--port", free_port()]
    with started("demo", *flags, ready=PAGE) as demo, opened(demo.url) as page:
        assert page.get_by_text("Which digit is number 2?").is_visible()
        answer = ask(page, "Which digit?", picture)
        # The page shows it as Markdown, and no control characters.
        assert re.findall("[a-z]", answer.text) == re.findall("[a-z]", wanted_text)
        assert page.locator("[data-testid=user] img").count() == 1
        assert FAILED not in ask(page, "And now?").text, "the conversation continues, with the image sent again"
        refused = ask(page, "What is it?", folder / "text.jpg").text
        assert "refused the question (400)" in refused
        assert FAILED in refused
        assert "cannot be decoded" in refused
        assert FAILED not in ask(page, "Is it even?").text, "the refused question is not sent again"
        page.goto(demo.url)
        page.get_by_text("Which digit is number 2?").click()
        assert "2.jpg" in str(page.locator("[aria-label='File thumbnail'] img").get_attribute("src"))
        assert page.locator("textarea").input_value() == "Which digit is number 2?"
        assert demo.stop(signal.SIGINT) == 130
        assert demo.output == "interrupted\n"


@needs_page
def test_a_server_that_is_down_is_a_message_on_the_page(folder: Path) -> None:
    with started("demo", "--server", DOWN, "--port", free_port(), ready=PAGE) as demo, opened(demo.url) as page:
        for number in (1, 2):
            answer = ask(page, "Which digit?", folder / "exam" / f"{number}.jpg")
            assert f"The server at {DOWN} does not answer" in answer.text
            assert page.locator(BOT).count() == number


@needs_page
def test_demo_starts_the_server_itself_and_ends_it(folder: Path) -> None:
    with started("demo", "--hf-dir", folder / "tiny", "--port", free_port(), ready=PAGE) as demo:
        with opened(demo.url) as page:
            assert FAILED not in ask(page, "Which digit?", folder / "exam" / "1.jpg").text
        assert demo.stop(signal.SIGINT) == 130


@needs_page
def test_a_folder_that_cannot_be_served_ends_it(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--hf-dir", str(folder / "exam")]) == 2
    said = capfd.readouterr().err
    assert "config.json" in said
    assert "the server ended with exit code 2; its message is above" in said


def test_what_is_missing_is_one_message(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def says(*arguments: object) -> str:
        assert main(["--server", DOWN, *map(str, arguments)]) == 2
        return capsys.readouterr().err

    assert "make page" in says("--python", shutil.which("true").replace("true", "false"))  # type: ignore[union-attr]
    assert "cannot be run" in says("--python", folder / "no-such-python")
    assert main(["--server", "localhost:8000", "--python", "/bin/true"]) == 2
    assert "an address such as http://localhost:8000/v1" in capsys.readouterr().err


def test_every_wrong_example_is_listed(folder: Path, tmp_path: Path) -> None:
    check_examples(folder / "exam")
    with pytest.raises(DataError, match="does not exist"):
        check_examples(tmp_path)
    lines = ["{", "[]", '{"image": "x.jpg"}', '{"image": "x.jpg", "question": "?"}',
             '{"image": "../a.jpg", "question": "?"}']  # fmt: skip
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError) as found:
        check_examples(tmp_path)
    assert "5 problems" in str(found.value)
    for words in (
        "not valid JSON",
        "expected a JSON object",
        "must be texts",
        "x.jpg does not exist",
        "not in the folder",
    ):
        assert words in str(found.value)
