"""Notes which of the package's files a process runs, for benchmarks/house.py. Python imports it at start.

Three ways are told apart:

- `stacks`: files on the call stack where a process starts the next one of ours, and where the loss is computed;
- `step`: files with a function that runs between fetching the second step's batch and its loss;
- `import`: files with a function that runs while an import reads, transforms and writes weights.
"""

import atexit
import inspect
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = os.environ["HOUSE_PACKAGE"] + os.sep
KIND = os.environ["HOUSE_KIND"]
WEIGHTS = ("convert", "weights", "checkpoint", "files", "cli")
SAMPLES = ("data", "media", "models", "parallel", "training")
TOOL = 3
notes: dict[str, set[str]] = {"stacks": set(), "step": set(), "import": set()}
fetches = 0


def stack(frame: FrameType | None) -> set[str]:
    """Return the package's files on a call stack."""
    result = set()
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE) and frame.f_code.co_name != "<module>":
            result.add(frame.f_code.co_filename)
        frame = frame.f_back
    return result


def started(code: CodeType, offset: int) -> object:
    """Note a function that starts."""
    global fetches
    path, name = code.co_filename, code.co_name
    if not path.startswith(PACKAGE):
        return sys.monitoring.DISABLE
    # Bodies of modules and classes, and type parameters, run when a file is imported.
    if not code.co_flags & inspect.CO_OPTIMIZED or name.startswith("<generic"):
        return None
    part = path.removeprefix(PACKAGE).split(os.sep)[0]
    if KIND == "import":
        if part in WEIGHTS:
            notes["import"].add(path)
        return sys.monitoring.DISABLE
    fetches += name == "fetch_step"
    if f"{os.sep}loss{os.sep}" in path and fetches:
        notes["stacks"] |= stack(sys._getframe(1))
        fetches = 3 if fetches == 2 else fetches
    elif fetches == 2 and part in SAMPLES:
        notes["step"].add(path)
    return None


def start_process(*args: Any, **kwargs: Any) -> None:
    """Note who starts a process of Python, then start it. Others are the libraries': megatron-core runs git when it is
    imported."""
    command = kwargs["args"] if "args" in kwargs else args[1]
    is_python = [*command][:1] == [sys.executable]
    if KIND == "train" and is_python and threading.current_thread() is threading.main_thread():
        notes["stacks"] |= stack(sys._getframe(1))
    _start_process(*args, **kwargs)


def write() -> None:
    """Write what was noted."""
    text = json.dumps({way: sorted(paths) for way, paths in notes.items()})
    Path(os.environ["HOUSE_NOTES"], f"{os.getpid()}.json").write_text(text)


_start_process = subprocess.Popen.__init__
subprocess.Popen.__init__ = start_process  # type: ignore[method-assign, assignment]
_exit = os._exit


def exit_at_once(code: int) -> None:
    """Write, then end as os._exit does."""
    write()
    _exit(code)


os._exit = exit_at_once  # type: ignore[assignment]
atexit.register(write)
sys.monitoring.use_tool_id(TOOL, "house")
sys.monitoring.register_callback(TOOL, sys.monitoring.events.PY_START, started)
sys.monitoring.set_events(TOOL, sys.monitoring.events.PY_START)
