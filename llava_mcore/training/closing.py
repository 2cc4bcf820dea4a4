"""Errors while closing a run, which must not replace the error that ended it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from llava_mcore.errors import LlavaMcoreError, os_error_text

logger = logging.getLogger(__name__)


def warn_on_failure(step: str, action: Callable[[], object]) -> None:
    """Do something that a run can do without; a failure is logged as a warning on one line.

    Later steps still run, and the error that ended the run, if any, stays the one that is reported. Caught are failures
    of files, servers and libraries. Programming errors, such as a TypeError, are raised as usual.
    """
    try:
        action()
    except OSError as error:
        _warn(step, os_error_text(error))
    except (LlavaMcoreError, RuntimeError, ValueError) as error:  # torch raises RuntimeError for a full disk
        _warn(step, str(error) or type(error).__name__)


def _warn(step: str, problem: str) -> None:
    logger.warning("%s: %s", step, " ".join(problem.split()))
