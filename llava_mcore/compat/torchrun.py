"""torchrun (torch 2.11 to 2.15) waits half a minute for the remaining processes when one has failed."""

from __future__ import annotations

import functools
import inspect
import signal
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from llava_mcore.compat.required import replace_name, required


def limit_closing(api: ModuleType, seconds: Callable[[Mapping[int, Any]], int]) -> None:
    """Patch torchrun: it gives the remaining processes `seconds` to end.

    Args:
        api: torch.distributed.elastic.multiprocessing.api.
        seconds: called with the failures, by local rank.

    Raises:
        AttributeError: this version of torch ends its workers differently.
    """
    context = required(api, "SubprocessContext")
    close = required(context, "_close")
    if list(inspect.signature(close).parameters) != ["self", "death_sig", "timeout"]:
        raise AttributeError(f"torch has changed {close.__qualname__}: {__name__} has to follow")

    @functools.wraps(close)
    def close_soon(self: Any, death_sig: signal.Signals, timeout: int = 30) -> None:
        close(self, death_sig, seconds(required(self, "_failures")))

    replace_name(context, "_close", close_soon)
