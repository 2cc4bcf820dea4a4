"""The endless stream of micro-batches of one data-parallel rank, and its place."""

from __future__ import annotations

import contextlib
import re
import sys
import tarfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import torch
from megatron.energon import SavableDataLoader, SavableDataset, WorkerConfig, get_train_dataset
from megatron.energon.savable_loader import SavableDataLoaderState, SavableDatasetCheckpoint

from llava_mcore.config.schema import DataConfig
from llava_mcore.data.assets import Assets
from llava_mcore.data.dataset_path import SPLIT, check_dataset, fingerprint
from llava_mcore.data.plain import from_plain, to_plain
from llava_mcore.data.samples import Batch
from llava_mcore.data.task_encoder import ChatTaskEncoder, raise_data_error
from llava_mcore.errors import DataError, problems

SAMPLES_PER_SLICE = 100
"""Samples that are read one after the other before another place of the data is drawn, when shuffling."""
SECONDS_BETWEEN_SNAPSHOTS = 10.0
"""Loader processes note their place this often; a restored loader repeats at most this much work."""
FORMAT = 1
WORKER_ERROR = re.compile(r"Caught \w+ in DataLoader worker process \d+\.\nOriginal Traceback")


class TrainLoader:
    """Batches of one data-parallel rank, for ever, in an order fixed by seed, data and settings.

    The samples are divided over data-parallel size x max(1, num_workers) streams, and rank r takes the streams from
    r * max(1, num_workers) on, one batch of each in turn. So runs that agree in this product (1 rank with 2 workers,
    2 ranks with 1 or 0 workers) and in micro-batch size read the same global batches, as long as the number of
    micro-batches of a global batch is a multiple of the product. Other numbers give another order.

    Everything that fails, a broken sample too, raises DataError.
    """

    def __init__(
        self, data: DataConfig, assets: Assets, *, micro_batch_size: int, dp_rank: int, dp_size: int, seed: int
    ) -> None:
        """Open the data; nothing is read before the first batch. DataError for data that is not prepared."""
        leaves = check_dataset(data.path)
        assert data.path is not None
        self.path: Path = data.path
        self._settings: dict[str, Any] = {
            "data-parallel size": dp_size,
            "data-parallel rank": dp_rank,
            "data.num_workers": data.num_workers,
            "data.shuffle_buffer_size": data.shuffle_buffer_size,
            "training.micro_batch_size": micro_batch_size,
            "training.seed": seed,
            "megatron-energon": version("megatron-energon"),
            "data (made by energon prepare)": fingerprint(self.path),
        }
        workers = WorkerConfig(
            rank=dp_rank,
            world_size=dp_size,
            num_workers=data.num_workers,
            seed_offset=seed,
            global_error_handler=raise_data_error,
            restore_error_handler=raise_data_error,
        )
        encoder = ChatTaskEncoder(assets, seq_length=data.seq_length)
        with self._reading():
            dataset = _open_dataset(data, encoder, workers, micro_batch_size)
            _check_streams(dataset, workers, leaves)
            self._loader: _ExactLoader | None = _ExactLoader(
                dataset, checkpoint_every_sec=SECONDS_BETWEEN_SNAPSHOTS, watchdog_timeout_seconds=None
            )
        self._loader.pin_memory = torch.cuda.is_available()
        # Else starting the loader would draw from the global generator, and a resumed run from another place of it.
        self._loader.generator = torch.Generator().manual_seed(seed)
        self._batches: Iterator[Batch] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the next micro-batch. DataError if a sample or a shard cannot be read; the loader is closed then."""
        try:
            with self._reading():
                if self._batches is None:
                    self._batches = iter(self._open())
                return next(self._batches)
        except StopIteration:
            self.close()
            raise DataError(f"{self.path}: the data ended") from None
        except DataError:
            self.close()
            raise

    def state(self) -> dict[str, Any]:
        """Return the place behind the last batch taken, as plain containers and tensors.

        `torch.save` it, one for each data-parallel rank; `torch.load(…, weights_only=True)` reads it.
        """
        with self._reading():
            place = to_plain(self._open().save_state_rank())
        return {"format": FORMAT, "settings": self._settings, "place": place}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue behind the batch after which state was taken. Only before the first batch.

        Raises DataError that lists every setting in which this loader differs from the one that was saved.
        """
        assert self._batches is None, "restore() comes before the first batch"
        self._check_state(state)
        try:
            place = from_plain(state["place"])
            with self._reading():
                self._open().restore_state_rank(place)
        except (KeyError, TypeError, AttributeError, AssertionError) as error:
            raise DataError(f"the saved place in {self.path} cannot be restored: {error!r}") from error

    def close(self) -> None:
        """End the loader processes. Calling it again does nothing."""
        if self._loader is not None:
            self._loader.close()
        self._loader = self._batches = None

    def _open(self) -> _ExactLoader:
        if self._loader is None:
            raise DataError(f"the loader of {self.path} is closed")
        return self._loader

    def _check_state(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict) or state.get("format") != FORMAT or "place" not in state:
            raise DataError(f"this is no place in the data that this version saved (expected format {FORMAT})")
        saved: dict[str, Any] = state["settings"]
        found = [
            f"{name}: saved with {saved.get(name)}, now {self._settings.get(name)}"
            for name in dict.fromkeys([*saved, *self._settings])
            if saved.get(name) != self._settings.get(name)
        ]
        if found:
            advice = "resume with the same settings, or start the data anew (without --load-optim)"
            raise DataError(problems(f"the saved place does not belong to this loader of {self.path}; {advice}", found))

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Report what reading raises as DataError, and keep what energon prints away from stdout.

        Loader processes are forked inside, so their output goes to stderr too.
        """
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield
        except DataError as error:
            raise DataError(_own_message(error)) from error
        # A dead loader process is noticed by a signal's handler, or by torch on its pipe.
        except (ConnectionError, EOFError) as error:
            raise self._killed(error) from error
        except (OSError, ValueError, tarfile.TarError) as error:
            raise DataError(f"{self.path} cannot be read: {type(error).__name__}: {_own_message(error)}") from error
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise self._killed(error) from error

    def _killed(self, error: Exception) -> DataError:
        return DataError(
            f"{self.path}: a loader process was killed ({error!r}); if memory ran out, lower data.num_workers or "
            "data.shuffle_buffer_size"
        )


class _ExactLoader(SavableDataLoader[Batch]):
    """Energon's loader (7.4.1) without a loss of place, and with an end."""

    _iterator: Any  # torch's

    def close(self) -> None:
        """End the loader processes at once. Left to the garbage collector, each would be waited for five seconds."""
        if self.num_workers > 0 and self._iterator is not None:
            self._iterator._shutdown_workers()
        self._iterator = self._epoch_iterator = None

    def restore_state_rank(self, state: SavableDataLoaderState | None) -> None:
        """Restore, and count right.

        Energon restores for each worker a snapshot and the number of batches to skip after it, but counts a worker
        that has not delivered yet as being at the snapshot. Saving again before every worker has delivered would
        repeat batches.
        """
        super().restore_state_rank(state)
        if state is None or self.num_workers == 0:
            return
        for worker, place in enumerate(state.worker_states):
            assert isinstance(place, SavableDatasetCheckpoint)
            if place.state is not None:
                self._worker_sample_counters[worker] = place.state.sample_index + place.offset - 1


def _open_dataset(
    data: DataConfig, encoder: ChatTaskEncoder, workers: WorkerConfig, batch_size: int
) -> SavableDataset[Batch]:
    shuffles = data.shuffle_buffer_size > 1
    try:
        return get_train_dataset(
            data.path,
            split_part=SPLIT,
            worker_config=workers,
            batch_size=batch_size,
            shuffle_buffer_size=data.shuffle_buffer_size if shuffles else None,
            max_samples_per_sequence=SAMPLES_PER_SLICE if shuffles else None,
            task_encoder=encoder,
        )
    # What energon finds wrong in dataset.yaml, split.yaml or a blend is mostly found by assertions and look-ups.
    except (AssertionError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise DataError(f"{data.path} cannot be opened, see its .nv-meta/dataset.yaml: {error!r}") from error


def _check_streams(dataset: SavableDataset[Batch], workers: WorkerConfig, leaves: list[Path]) -> None:
    """Every stream needs a sample: one without would end and let the other ranks wait for it."""
    empty = [i for i in range(max(1, workers.num_workers)) if dataset.len_worker(i) == 0]
    if empty:
        streams = workers.world_size * max(1, workers.num_workers)
        raise DataError(
            f"{', '.join(map(str, leaves))}: fewer samples than the {streams} streams of {workers.world_size} "
            f"data-parallel ranks with {workers.num_workers} workers each; lower data.num_workers"
        )


def _own_message(error: Exception) -> str:
    """An error from a loader process arrives as the text of its traceback; return the message at its end."""
    text = str(error)
    if not WORKER_ERROR.match(text):
        return text
    name = type(error).__qualname__
    return text.rpartition(f"{name}: ")[2].strip()
