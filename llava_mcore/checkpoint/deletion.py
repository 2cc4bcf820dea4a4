"""Deletes checkpoints. Failures are logged and do not stop training."""

from __future__ import annotations

import atexit
import logging
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)


def delete(folder: Path) -> None:
    """Delete a folder, or log why not: on NFS a file that is still open remains as .nfs…"""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        logger.warning("%s could not be deleted: %s", folder, error)


def delete_in_background(folders: Sequence[Path]) -> threading.Thread:
    """Delete folders in a thread that the process waits for before it ends, even in `exit_now`."""

    def work() -> None:
        for folder in folders:
            delete(folder)
        atexit.unregister(thread.join)

    thread = threading.Thread(target=work, name="deletion")
    atexit.register(thread.join)
    thread.start()
    return thread
