"""A server of the `serve` command, in a process of its own."""

from __future__ import annotations

import base64
import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.helpers.commands import ROOT, kill_tree


@dataclass
class Started:
    """A command that serves. `url`: what it printed. `output`: of its end, after `stop`."""

    process: subprocess.Popen[str]
    url: str
    output: str = field(default="")

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        self.output = self.process.communicate(timeout=30)[0]
        return self.process.returncode

    def chat(self, text: str, *pictures: bytes, **fields: Any) -> httpx.Response:
        """Ask a question about images."""
        return httpx.post(f"{self.url}/chat/completions", json=request(text, *pictures, **fields), timeout=60)


def request(text: str, *pictures: bytes, **fields: Any) -> dict[str, Any]:
    """Return a request for an answer, the most probable one."""
    urls = [f"data:image/jpeg;base64,{base64.b64encode(data).decode()}" for data in pictures]
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
    return {"messages": [message], "max_tokens": 8, "temperature": 0} | fields


@contextlib.contextmanager
def started(command: str, *arguments: object, ready: str, seconds: float = 90) -> Iterator[Started]:
    """Run a command until the end of the context.

    Args:
        ready: pattern of the line that it prints when it is ready, with the address as its group.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "llava_mcore", command, *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, start_new_session=True,
    )  # fmt: skip
    try:
        yield Started(process, _address(process, ready, time.monotonic() + seconds))
    finally:
        if process.poll() is None:
            kill_tree(process.pid)
        process.wait()


def _address(process: subprocess.Popen[str], ready: str, end: float) -> str:
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if match := re.search(ready, line):
            return match[1]
        assert time.monotonic() < end, seen
    raise AssertionError(f"exit code {process.wait()}\n{seen}")


def serving(hf_dir: Path, *arguments: object) -> contextlib.AbstractContextManager[Started]:
    """Serve a folder at a free port."""
    return started("serve", "--hf-dir", hf_dir, "--port", 0, *arguments, ready=r"at (http://\S+/v1)")
