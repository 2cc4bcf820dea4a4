"""Deliveries from a loader process, and its errors."""

from __future__ import annotations

import contextlib
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from llava_mcore.compat.torch import end_loader_processes
from llava_mcore.data.loader.delivery import Delivery
from llava_mcore.data.loader.loader_process import leave_out_of_collections, loader_process_init
from llava_mcore.data.loader.skips import MEMORY_ADVICE
from llava_mcore.data.storage.remote import storage_message
from llava_mcore.errors import DataError

MIN_PREFETCH = 2
"""Minimum number of deliveries that a loader process prepares in advance."""
WORKER_ERROR = re.compile(r"Caught \w+ in DataLoader worker process \d+\.\nOriginal Traceback")


class BatchSource:
    """Deliveries of one loader process, or of this process."""

    def __init__(
        self,
        server: IterableDataset[Delivery],
        *,
        in_process: bool,
        seed: int,
        timeout: float,
        num_ahead: int = MIN_PREFETCH,
    ) -> None:
        """timeout: maximum seconds per delivery of a loader process. num_ahead: deliveries that it prepares."""
        # A separate generator: otherwise starting would use the global one, and a resumed run would differ.
        self._loader = DataLoader(
            server,
            batch_size=None,
            num_workers=0 if in_process else 1,
            # Forked, whatever Python's default is: the process inherits the open streams.
            multiprocessing_context=None if in_process else "fork",
            worker_init_fn=loader_process_init(),
            prefetch_factor=None if in_process else num_ahead,
            timeout=0 if in_process else timeout,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator().manual_seed(seed),
        )
        self._iterator: Any = None

    def next(self) -> Delivery:
        if self._iterator is None:
            if self._loader.num_workers > 0:
                leave_out_of_collections()
            self._iterator = iter(self._loader)
        delivery: Delivery = next(self._iterator)
        delivery.take_pixels(pinned=False)  # with a GPU torch's thread has pinned them
        return delivery

    def close(self) -> None:
        """End the process at once."""
        if self._loader.num_workers > 0 and self._iterator is not None:
            end_loader_processes(self._iterator)
        self._iterator = None


@contextlib.contextmanager
def reading(path: Path | str, timeout: float) -> Iterator[None]:
    """Report errors of reading as DataError, and redirect energon's output from stdout to stderr.

    Loader processes are forked inside, so their output also goes to stderr.

    Args:
        path: path of the data, for messages.
        timeout: maximum seconds per batch of a loader process, for a message.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except DataError as error:
        raise DataError(_own_message(error)) from error
    # A dead loader process is noticed by a signal handler, or by torch on its pipe.
    except (ConnectionError, EOFError) as error:
        raise _killed(path, error) from error
    except MemoryError as error:
        raise DataError(f"{path} cannot be read: {type(error).__name__}; {MEMORY_ADVICE}") from error
    except (OSError, ValueError, tarfile.TarError) as error:
        raise DataError(f"{path} cannot be read: {type(error).__name__}: {_own_message(error)}") from error
    except RuntimeError as error:
        message = storage_message(error)
        if message is not None:
            raise DataError(f"{path} cannot be read: {message}") from error
        if str(error).startswith("DataLoader timed out"):
            raise DataError(
                f"{path}: no batch came within data.timeout = {timeout} seconds; check whether its "
                "storage answers, or raise data.timeout"
            ) from error
        with noticing_killed_loaders(path):
            raise


@contextlib.contextmanager
def noticing_killed_loaders(path: Path | str | None) -> Iterator[None]:
    """Report a killed loader process as DataError: torch raises that from a signal handler, at any point."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise _killed(path, error) from error


def _killed(path: Path | str | None, error: Exception) -> DataError:
    return DataError(f"{path}: a loader process was killed ({error!r}); {MEMORY_ADVICE}")


def _own_message(error: Exception) -> str:
    """An error from a loader process arrives as the text of its traceback; return the message at its end."""
    text = str(error)
    if not WORKER_ERROR.match(text):
        return text
    name = type(error).__qualname__
    return text.rpartition(f"{name}: ")[2].strip()
