"""What the machine refuses, and consoles that are closed, full or of another encoding: a message and an exit code."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llava_mcore.errors import ConfigError, os_error_text
from llava_mcore.files.regular import naming
from llava_mcore.launch.checkout import REPOSITORY
from llava_mcore.log import warn_on_failure
from llava_mcore.processes.control import with_messages


def raising(error: BaseException) -> Callable[[], int]:
    def command() -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/a/b"), "/a/b: Permission denied; change its permissions"),
        (OSError(errno.EROFS, "Read-only file system", "/a", None, "/b"), "/a -> /b: Read-only file system; choose"),
        (OSError(errno.ENOTTY, "Not a typewriter", "/a"), "/a: Not a typewriter"),
        (OSError("a library's words"), "a library's words"),
        (
            shutil.Error([("/a", "/b", "[Errno 28] No space left"), ("/c", "/d", "x")]),
            "/b: could not be copied from /a: ",
        ),
        (ConfigError("--tp 3: no"), "--tp 3: no"),
    ],
)
def test_one_message_and_exit_code_2(error: Exception, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An error is one message, with what to do where that is known."""
    assert with_messages(raising(error)) == 2
    assert capsys.readouterr().err.startswith(f"error: {says}")


def test_mistakes_of_ours_keep_their_traceback() -> None:
    with pytest.raises(TypeError):
        with_messages(raising(TypeError("ours")))


def test_a_write_names_its_file_or_at_least_our_line(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught, naming(tmp_path / "x"), open("/dev/full", "wb", buffering=0) as file:
        file.write(b"1")
    assert os_error_text(caught.value).startswith(f"{tmp_path}/x: No space left on device; free some space there")
    assert "standard output or a file: " in os_error_text(OSError(errno.ENOSPC, "No space left on device"))


def run(line: str, **environ: str) -> tuple[int, str]:
    """Run a line of bash in which `show` prints a configuration; return its exit code and what came on stderr."""
    done = subprocess.run(
        ["bash", "-c", f'show() {{ "{sys.executable}" -m llava_mcore show-config "$@"; }}; {line}'],
        capture_output=True, text=True, cwd=REPOSITORY, env=os.environ | environ, check=False, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("show | true; exit ${PIPESTATUS[0]}", 141, ""),
        ("show >&-", 0, ""),
        ("show >&- <&- 2>&-", 0, ""),
        ("show > /dev/full", 2, "error: standard output"),
        ("cd $(mktemp -d) && rmdir $PWD && show", 2, "error: the current folder: No such file or directory"),
        ("show --name 日本", 2, "error: The configuration is not valid (1 problem):\n  - name (from --name): found"),
    ],
)
def test_consoles(line: str, code: int, says: str) -> None:
    """Closed and full consoles, deleted folders and text beyond ASCII end as they should."""
    encoding = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    found, said = run(line, PYTHONPATH=str(REPOSITORY), **encoding)
    assert (found, said[: len(says)]) == (code, says) and "Traceback" not in said
    assert said.count("\n") <= says.count("\n") + 1


def test_a_step_at_the_end_that_fails_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []
    for error in (
        OSError(errno.EIO, "Input/output error", "/x"),
        RuntimeError("torch\n  says"),
        ConfigError("c"),
        ValueError(),
    ):
        warn_on_failure("a step", raising(error))
    warn_on_failure("a step", lambda: done.append("done"))
    assert done
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "a step: /x: Input/output error; the disk or the network file system failed",
        "a step: torch says",
        "a step: c",
        "a step: ValueError",
    ]
    with pytest.raises(TypeError):
        warn_on_failure("a step", raising(TypeError()))


def test_libraries_stay_quiet_if_they_are_imported_later() -> None:
    """transformers sets its own level at import; loader processes and commands have called this before."""
    code = (
        "import os; os.environ.pop('TRANSFORMERS_VERBOSITY', None)\n"
        "from llava_mcore import log; log.quiet_libraries()\n"
        "from transformers.utils import logging\n"
        "logging.get_logger('transformers.models.qwen3_vl').warning_once('noise')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "noise" not in done.stdout + done.stderr
