"""Debian's Chromium without a window, on the page of `demo`."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

CHROMIUM = shutil.which("chromium")
MILLISECONDS = 1000
BOT = "[data-testid=bot]"
UPLOADED = "[aria-label='File thumbnail']"


@dataclass(frozen=True)
class Answer:
    """What the page shows under a question, and the seconds from Enter until it was complete."""

    text: str
    seconds: float


@contextlib.contextmanager
def opened(url: str, *, width: int = 900, height: int = 760) -> Iterator[Page]:
    """Open a page. RuntimeError if there is no chromium on PATH."""
    if CHROMIUM is None:
        raise RuntimeError("chromium is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        # Root may not use Chromium's sandbox; the only page that it opens is ours.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": height})
        page.goto(url)
        page.wait_for_selector("textarea")
        yield page
        browser.close()


def ask(page: Page, question: str, *pictures: Path, seconds: float = 60) -> Answer:
    """Upload images, type a question, press Enter and wait for the answer."""
    shown = page.locator(BOT).count()
    if pictures:
        page.set_input_files("input[type=file]", [str(picture) for picture in pictures])
        page.wait_for_function(
            "([file, number]) => document.querySelectorAll(file).length == number", arg=[UPLOADED, len(pictures)]
        )
    page.fill("textarea", question)
    page.wait_for_timeout(0.2 * MILLISECONDS)
    start = time.perf_counter()
    page.press("textarea", "Enter")
    # While an answer arrives, nothing can be typed.
    page.wait_for_function(
        "([bot, number]) => { const all = document.querySelectorAll(bot);"
        " return all.length > number && all[number].innerText.trim() && !document.querySelector('textarea').disabled }",
        arg=[BOT, shown],
        timeout=seconds * MILLISECONDS,
    )
    return Answer(page.locator(BOT).last.inner_text().strip(), time.perf_counter() - start)
