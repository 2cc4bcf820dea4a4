"""What ends a run never takes the place of why it ends."""

from __future__ import annotations

import logging
from collections.abc import Callable

from llava_mcore.errors import LlavaMcoreError, os_error_text

logger = logging.getLogger(__name__)


def attempt(what: str, action: Callable[[], object]) -> None:
    """Do one of the things that close a run, or that it can do without; that it fails is a warning, on one line.

    The steps that follow are done all the same, and the error that ends the run, if there is one, stays the last word.
    Files, servers and libraries may fail. Mistakes of ours, such as a TypeError, are raised as ever.
    """
    try:
        action()
    except OSError as error:
        _warn(what, os_error_text(error))
    except (LlavaMcoreError, RuntimeError, ValueError) as error:  # torch raises RuntimeError for a full disk
        _warn(what, str(error) or type(error).__name__)


def _warn(what: str, problem: str) -> None:
    logger.warning("%s: %s", what, " ".join(problem.split()))
