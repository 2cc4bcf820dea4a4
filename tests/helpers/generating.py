"""`generate` in this process: many questions without a start of seconds for each."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llava_mcore.cli import generate as generate_command

Ask = Callable[..., tuple[int, str, str]]
_WORLD = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")


def generate_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Return a function that takes the command's arguments and returns its exit code, output and errors."""
    for name in _WORLD:
        monkeypatch.setenv(name, "")  # restored afterwards

    def run(*arguments: object) -> tuple[int, str, str]:
        code = generate_command.main([str(x) for x in arguments])
        return code, *capsys.readouterr()

    return run
