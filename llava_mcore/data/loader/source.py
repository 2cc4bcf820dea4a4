"""Deliveries from a loader process: a batch through a pipe, its pixels in shared memory; and errors of reading."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import mmap
import re
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from llava_mcore.compat.torch import end_loader_processes
from llava_mcore.data.loader.loader_process import leave_out_of_collections, loader_process_init
from llava_mcore.data.loader.sample_problems import MEMORY_ADVICE
from llava_mcore.data.samples import Batch
from llava_mcore.data.storage.remote import storage_message
from llava_mcore.errors import DataError
from llava_mcore.media.batch_fields import PIXEL_VALUES, as_used, in_memory


@dataclass(frozen=True, slots=True)
class Buffered:
    """The buffer that contains pixels."""

    buffer: int
    shape: tuple[int, ...]
    """[tiles, h, w, 3], as they are in memory; [patches, f]."""
    dtype: torch.dtype


class PixelBuffers:
    """Buffers that are used in turn. They are created before the loader process is forked, which then fills them.

    They are anonymous memory: there is nothing to clean up, and /dev/shm's limit does not apply. A copy that the loader
    process sends is the object that it was forked with.
    """

    def __init__(self, num_bytes: int, num_ahead: int) -> None:
        """Reserve the buffers; memory is only used when they are filled.

        Args:
            num_bytes: size of a buffer.
            num_ahead: batches that the loader process prepares in advance. While one is read, so many may be
                written; there is one more buffer for safety.
        """
        self.num_ahead = num_ahead
        self._index = next(_INDICES)
        _OPEN[self._index] = self
        num_buffers = num_ahead + 2
        memory = mmap.mmap(-1, num_buffers * max(1, num_bytes))
        self._buffers = torch.frombuffer(memory, dtype=torch.uint8).view(num_buffers, -1)
        self._next = 0

    def __reduce__(self) -> tuple[Callable[[int], PixelBuffers], tuple[Any, ...]]:
        return _opened, (self._index,)

    def put(self, pixels: Tensor) -> Buffered | None:
        """Put tiles [tiles, 3, h, w] or patches [patches, f] into the next buffer.

        None if there are none, or they are too many for a buffer.
        """
        laid_out = in_memory(pixels)
        if not pixels.numel() or pixels.nbytes > self._buffers.shape[1]:
            return None
        buffer, self._next = self._next, (self._next + 1) % len(self._buffers)
        buffered = Buffered(buffer, tuple(laid_out.shape), pixels.dtype)
        self._view(buffered).copy_(laid_out)
        return buffered

    def take(self, buffered: Buffered, *, pinned: bool) -> Tensor:
        """Return a copy of what was put in, in pinned memory if asked to."""
        pixels = self._view(buffered)
        return as_used(torch.empty_like(pixels, pin_memory=pinned).copy_(pixels))

    def _view(self, buffered: Buffered) -> Tensor:
        size = buffered.dtype.itemsize * torch.Size(buffered.shape).numel()
        return self._buffers[buffered.buffer, :size].view(buffered.dtype).view(buffered.shape)


_INDICES = itertools.count()
_OPEN: WeakValueDictionary[int, PixelBuffers] = WeakValueDictionary()
"""All of this process: torch's thread that pins memory receives deliveries, and nothing else."""


def _opened(index: int) -> PixelBuffers:
    return _OPEN[index]


MIN_PREFETCH = 2
"""Minimum number of deliveries that a loader process prepares in advance."""
WORKER_ERROR = re.compile(r"Caught \w+ in DataLoader worker process \d+\.\nOriginal Traceback")


@dataclass
class Delivery:
    """A batch of a stream, and the stream's position after it as plain containers (None in validation)."""

    stream: int
    batch: Batch
    position: dict[str, Any] | None
    buffered: Buffered | None = None
    """Where the batch's pixels are, if they are not in the batch."""
    buffers: PixelBuffers | None = None

    def pin_memory(self) -> Self:
        """Copy the tensors to pinned memory (called by torch in a thread, so that a step does not wait for it)."""
        self.take_pixels(pinned=True)
        self.batch = self.batch.pin_memory()
        return self

    def take_pixels(self, *, pinned: bool) -> None:
        """Copy pixels from their buffer into the batch."""
        if self.buffers is not None and self.buffered is not None:
            self.batch.media[PIXEL_VALUES] = self.buffers.take(self.buffered, pinned=pinned)
            self.buffers = self.buffered = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the tensors except pixels as bytes for the pipe: shared memory for each of them would cost more."""
        fields = {f.name: getattr(self.batch, f.name) for f in dataclasses.fields(self.batch) if f.name != "media"}
        arrays = {name: value.numpy() for name, value in fields.items() if isinstance(value, Tensor)}
        pixels = in_memory(self.batch.media[PIXEL_VALUES]).contiguous()
        media = {name: value.numpy() for name, value in (self.batch.media | {PIXEL_VALUES: pixels}).items()}
        small = {name: vars(self)[name] for name in ("stream", "position", "buffered", "buffers")}
        return small | {"fields": fields | arrays, "arrays": list(arrays), "media": media}

    def __setstate__(self, state: dict[str, Any]) -> None:
        fields = state["fields"]
        fields |= {name: torch.from_numpy(fields[name]) for name in state["arrays"]}
        media = {name: torch.from_numpy(value) for name, value in state["media"].items()}
        media[PIXEL_VALUES] = as_used(media[PIXEL_VALUES])
        self.stream, self.position = state["stream"], state["position"]
        self.buffered, self.buffers = state["buffered"], state["buffers"]
        self.batch = Batch(**fields, media=media)


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
        # torch and storage clients report several failures as RuntimeError; anything else is a bug.
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
