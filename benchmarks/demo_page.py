"""Ask the page of `demo` in a browser, show the seconds until each answer, and take docs/demo.png.

    python -m benchmarks.demo_page --hf-dir outputs/quickstart/export --exam outputs/quickstart/exam

Needs `make quickstart`, `make page` and Debian's chromium.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.browser import ask, opened
from benchmarks.record import ROOT, show

QUESTIONS = 6
"""Asked questions; the first one also waits for what the browser and the server do once."""
SHOWN = 2
"""Of them in the image, so that both fit."""
READY = "the page is at "


def main() -> None:
    """Start the page, ask, print a table, write the image."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--hf-dir", type=Path, required=True, help="the quickstart's export")
    parser.add_argument("--exam", type=Path, required=True, help="the quickstart's held-out images and questions")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "demo.png")
    parser.add_argument("--port", type=int, default=7861)
    args = parser.parse_args()
    flags = ["--hf-dir", str(args.hf_dir), "--examples", str(args.exam), "--port", str(args.port)]
    command = [sys.executable, "-m", "llava_mcore", "demo", *flags]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert demo.stdout is not None
    try:
        url = next(line for line in demo.stdout if line.startswith(READY)).removeprefix(READY).split(";")[0]
        show(_ask_all(url, args.exam, args.picture))
    finally:
        demo.terminate()
        demo.wait()


def _ask_all(url: str, exam: Path, picture: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (exam / "questions.jsonl").read_text(encoding="utf-8").splitlines()]
    rows: list[dict[str, object]] = []
    with opened(url) as page:
        for line in lines[:: len(lines) // QUESTIONS + 1]:
            found = ask(page, line["question"], exam / line["image"])
            rows.append({"question": line["question"], "reference": line["answer"], "answer": found.text,
                         "seconds": f"{found.seconds:.2f}"})  # fmt: skip
            if len(rows) == SHOWN:
                page.wait_for_timeout(1000)
                page.screenshot(path=picture)
            if len(rows) >= SHOWN:
                page.goto(url)  # a new conversation: the quickstart trains on single questions
                page.wait_for_selector("textarea")
    return rows


if __name__ == "__main__":
    main()
