"""Conversions in processes of their own: to be killed, or to have their memory measured."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.helpers.world import PRELOADED

Context = multiprocessing.context.ForkServerContext


def forkserver() -> Context:
    """Return the context whose server has imported torch, transformers and megatron-core."""
    context = multiprocessing.get_context("forkserver")
    if not torch.cuda.is_available():
        context.set_forkserver_preload(PRELOADED)
    return context


def convert(step: str, source: Path, target: Path, options: dict[str, Any]) -> None:
    """Run one conversion; `step` is import or export."""
    from llava_mcore import log
    from llava_mcore.convert.export_hf import export_hf
    from llava_mcore.convert.import_hf import import_hf

    log.quiet_libraries()
    torch.set_num_threads(1)
    {"import": import_hf, "export": export_hf}[step](source, target, **options)


def kill_after(seconds: float, step: str, source: Path, target: Path, options: dict[str, Any]) -> bool:
    """Start a conversion and SIGKILL it after some time; tell whether it was still running."""
    process = forkserver().Process(target=convert, args=(step, source, target, options))
    process.start()
    process.join(seconds)
    running = process.is_alive()
    process.kill()
    process.join()
    return running


def time_convert(step: str, source: Path, target: Path, options: dict[str, Any]) -> float:
    """Return how many seconds a conversion takes in a process of its own, once the server has imported everything."""
    warm_up = forkserver().Process(target=abs, args=(0,))
    warm_up.start()
    warm_up.join()
    start = time.monotonic()
    process = forkserver().Process(target=convert, args=(step, source, target, options))
    process.start()
    process.join()
    assert process.exitcode == 0
    return time.monotonic() - start


def _measure(queue: Any, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key + ":"))

    import llava_mcore.convert.export_hf
    import llava_mcore.convert.import_hf  # noqa: F401  what importing takes is not counted

    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    before = status("VmRSS")
    function(*arguments)
    queue.put(status("VmHWM") - before)


def peak_growth(function: Callable[..., None], *arguments: Any) -> int:
    """Run a function in a process of its own and return by how many bytes its RSS grew at the peak."""
    context = forkserver()
    queue = context.SimpleQueue()
    process = context.Process(target=_measure, args=(queue, function, arguments))
    process.start()
    process.join()
    assert process.exitcode == 0
    return queue.get()
