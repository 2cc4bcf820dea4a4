"""Tries an untrusted chat template in a process with little memory and time.

transformers renders templates in Jinja's sandbox, which denies access to files and modules and limits range(). It
limits neither nested loops nor `'a' * 10 ** 10`, so a template could use all memory or never end.
"""

from __future__ import annotations

import functools
import os
import resource
import select
import signal
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError

from llava_mcore.errors import ConfigError

MOST_MEMORY = 1 << 30
"""Bytes, in addition to those that the process already has."""
MOST_SECONDS = 5
"""Seconds of CPU time."""
LONGEST_WAIT = 120
"""Seconds until the process is given up, which may also wait for a lock that another thread held when it was forked."""
MOST_CHARS = 1_000_000
"""Characters of the text that the template renders from a few words."""
TOO_MUCH_MEMORY, TOO_MANY_CHARS = 3, 4
RENDER_ERRORS = (
    *(TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError),
    *(RecursionError, MemoryError),
)
"""Errors of templates: a TypeError if one expects text and gets a list, an OverflowError for a longer range() than the
sandbox allows, a MemoryError if a string is multiplied too often."""
MESSAGE_PARTS: tuple[Any, ...] = ("probe", [{"type": "image"}, {"type": "text", "text": "probe"}])


def check_bounds(template: str, origin: str) -> None:
    """Raise ConfigError if rendering a short conversation takes too much time or memory. Other errors are not reported
    here.

    origin: the template's source, for messages.
    """
    excess = _look(template)
    if excess is not None:
        raise ConfigError(
            f"chat template ({origin}): rendering a question and its answer takes {excess}; this is too much, "
            "choose another with --chat-template"
        )


@functools.lru_cache(maxsize=16)
def _look(template: str) -> str | None:
    """Return the limit that the template exceeds, or None."""
    with warnings.catch_warnings():
        # Python warns about forks in a process with threads. The child only renders, and exits without cleaning up.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _render_and_leave(template)
    status = _status_within(child, LONGEST_WAIT)
    if status is None:
        return f"longer than {LONGEST_WAIT} s"
    if os.WIFSIGNALED(status):
        took_time = os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
        return f"more than {MOST_SECONDS} s" if took_time else f"so much that it ends with signal {os.WTERMSIG(status)}"
    code = os.WEXITSTATUS(status)
    if code == TOO_MUCH_MEMORY:
        return f"more than {MOST_MEMORY >> 30} GiB of memory"
    return f"more than {MOST_CHARS} characters" if code == TOO_MANY_CHARS else None


def _status_within(child: int, seconds: float) -> int | None:
    """Wait for a child process and return its status; None: it has not ended in time, and was killed."""
    handle = os.pidfd_open(child)
    try:
        has_ended, _, _ = select.select([handle], [], [], seconds)
        if not has_ended:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        return status if has_ended else None
    finally:
        os.close(handle)


def _render_and_leave(template: str) -> NoReturn:
    code = 0
    try:
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        memory = _address_space() + MOST_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS + 1))
        code = max(_rendered(template, content, prompt) for content in MESSAGE_PARTS for prompt in (True, False))
    except MemoryError:
        code = TOO_MUCH_MEMORY
    finally:
        os._exit(code)


def _rendered(template: str, content: Any, prompt: bool) -> int:
    from transformers.utils.chat_template_utils import render_jinja_template  # takes seconds

    turns: Sequence[dict[str, Any]] = [{"role": "user", "content": content}, {"role": "assistant", "content": "probe"}]
    try:
        texts, _ = render_jinja_template(
            conversations=[turns], chat_template=template, add_generation_prompt=prompt, bos_token="", eos_token=""
        )
    except MemoryError:
        raise
    except RENDER_ERRORS:  # reported where the template is used
        return 0
    return TOO_MANY_CHARS if len(texts[0]) > MOST_CHARS else 0


def _address_space() -> int:
    """Return the size of the process's address space in bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
