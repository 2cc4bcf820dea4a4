"""The endless stream of micro-batches of one data-parallel rank, and its position."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from megatron.energon.epathlib import EPath

from llava_mcore.config.rules.batch_size import BatchSizes
from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.encode.augment import Augmentation, augmentation_of
from llava_mcore.data.encode.tokens import log_origin, warn_of_other_pixels
from llava_mcore.data.loader.budgets import check_budgets, warnings_of_large_media
from llava_mcore.data.loader.open_streams import OpenedData, RankReads, limit_line, open_training
from llava_mcore.data.loader.sample_problems import SampleWarnings
from llava_mcore.data.loader.saved_position import (
    FORMAT,
    MICRO_BATCH,
    NUM_STREAMS,
    SavedStreams,
    differences,
    settings_of,
    settings_to_resume_with,
)
from llava_mcore.data.loader.source import MIN_PREFETCH, BatchSource, PixelBuffers, reading
from llava_mcore.data.loader.stream import Stream, StreamServer
from llava_mcore.data.loader.turns import (
    StreamTurns,
    share,
    states_to_read,
    streams_to_count,
    warnings_of_ranks,
)
from llava_mcore.data.samples import Batch
from llava_mcore.data.storage.dataset_path import check_dataset
from llava_mcore.errors import DataError, problems

logger = logging.getLogger(__name__)

SMALLER_MICRO_BATCHES = (
    "micro-batches have %d samples now, and had %d: global batches have other samples than they would have had, "
    "so losses differ from those of the uninterrupted run; samples are neither repeated nor left out"
)
"""A line of a resume, with both sizes."""


class TrainLoader:
    """Endless batches of one data-parallel rank, in an order fixed by seed, data, streams and micro-batch size.

    All ranks together read the same for every number of ranks and loader processes (see `turns`).

    A broken sample is skipped and reported in `Batch.skipped`; all other failures raise DataError.
    """

    def __init__(
        self,
        data: DataConfig,
        assets: Assets,
        *,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        seed: int,
        pad_multiple: int = 8,
        num_micro_batches: int = 1,
        batch_sizes: BatchSizes | None = None,
        saved: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        """Open the data, at the beginning or after a saved position; nothing is read before the first batch.

        Args:
            pad_multiple: the number of tokens of a micro-batch is padded to a multiple of this.
            num_micro_batches: of this rank per step. A step needs all of them before it starts, so loader processes
                prepare as many during the previous step.
            batch_sizes: global batch sizes over the run; None: always those micro-batches of every rank.
            saved: results of `state` on the ranks of the run that is resumed, whatever their number: at least of those
                that served this rank's streams.

        Raises:
            ConfigError: no image or audio clip fits into a sample, or data.augment cannot be used.
            DataError: the data is not prepared, or the position does not belong to this data and these settings.
        """
        # Refuse what cannot be used before anything is opened.
        leaves = check_dataset(data.path)
        check_budgets(data, assets)
        augmentation = augmentation_of(data, assets)
        assert data.path is not None
        self.path: Path | str = data.path
        self._timeout = data.timeout
        batch_sizes = batch_sizes or BatchSizes.of(micro_batch_size * num_micro_batches * dp_size, None)
        rank = RankReads(dp_rank, dp_size, micro_batch_size, num_micro_batches, batch_sizes, seed, pad_multiple)
        # For `read_again`: the same loader, which reads in this process.
        self._open_again = partial(TrainLoader, data.model_copy(update={"num_workers": 0}), assets, **vars(rank))

        # A saved position brings the number of streams, and must belong to the same settings.
        self._settings = settings_to_resume_with(data, assets, self.path, seed, micro_batch_size)
        saved_streams = self._saved_streams(saved, dp_rank, dp_size) if saved is not None else SavedStreams({}, {})
        # Open the datasets, and this rank's streams of them at their positions.
        with reading(self.path, self._timeout):
            opened = open_training(data, assets, rank, augmentation, num_streams=self._settings[NUM_STREAMS])
            self._restore(opened.streams, saved_streams.positions)
        self._settings[NUM_STREAMS] = opened.num_streams
        self.dataset_names = opened.dataset_names
        """Names of a blend's datasets, for the log; empty for a single dataset."""
        if dp_rank == 0:
            _log_start(leaves, data, assets, augmentation, opened, dp_size)

        # Divide the streams over loader processes, which are forked at the first batch, with the open streams.
        self._turns = _turns_of(rank, opened.num_streams, saved_streams.num_batches)
        self._positions = {n: saved_streams.positions.get(n) for n in opened.streams}
        buffer_bytes = micro_batch_size * _most_bytes(data, assets)
        self._sources = _serve(opened.streams, self._turns, data, seed, buffer_bytes, num_micro_batches)
        self._closed = False
        self._warnings = SampleWarnings(self.path, assets)

    @property
    def num_streams(self) -> int:
        """Streams that the data is divided into, over all ranks."""
        return self._settings[NUM_STREAMS]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the next micro-batch. DataError if the data cannot be read; the loader is closed then."""
        if self._closed:
            raise DataError(f"the loader of {self.path} is closed")
        stream = next(self._turns).stream
        try:
            with reading(self.path, self._timeout):
                delivery = self._sources[stream].next()
        except StopIteration:
            self.close()
            text = (
                "every dataset has been read as often as its max_epochs lets it: raise that, or train for fewer samples"
            )
            raise DataError(f"{self.path}: the data ended, since {text}") from None
        except DataError:
            self.close()
            raise
        assert delivery.stream == stream
        self._positions[stream] = delivery.position
        self._warnings.look_at(delivery.batch)
        return delivery.batch

    def state(self) -> dict[str, Any]:
        """Return this rank's position after the last batch, as plain containers and tensors.

        `torch.save` it, one for each data-parallel rank; `torch.load(…, weights_only=True)` reads it.
        """
        return {
            "format": FORMAT,
            "settings": self._settings,
            "streams": dict(self._positions),
            "num_batches": dict(self._turns.num_batches),
        }

    def read_again(self, state: dict[str, Any], count: int) -> list[Batch]:
        """Return the micro-batches that followed an earlier state of this loader, which this process reads alone.

        Raises:
            DataError: the data cannot be read any more.
        """
        again = self._open_again(saved=[state])
        try:
            return [next(again) for _ in range(count)]
        finally:
            again.close()

    def close(self) -> None:
        """Stop the loader processes. A second call does nothing."""
        self._closed = True
        for source in set(self._sources.values()):
            source.close()
        self._sources = {}

    def _saved_streams(self, saved: Sequence[dict[str, Any]], dp_rank: int, dp_size: int) -> SavedStreams:
        """Return where the streams are that this rank serves and counts, and keep the saved number of streams.

        Raises DataError that lists every setting that differs from the saved one.
        """
        before = settings_of(saved)
        if self.num_streams is None:
            self._settings[NUM_STREAMS] = before[NUM_STREAMS]
        mismatches = differences(before, self._settings)
        if mismatches:
            advice = "resume with the same settings, or start a run with another --name from its weights "
            advice += "(--megatron-load-dir)"
            raise DataError(
                problems(f"the saved position does not belong to this loader of {self.path}; {advice}", mismatches)
            )
        chosen = states_to_read(len(saved), self.num_streams, dp_rank, dp_size)
        result = SavedStreams.of([saved[index] for index in chosen])
        missing = [n for n in streams_to_count(self.num_streams, dp_rank, dp_size) if n not in result.num_batches]
        if missing:
            raise DataError(f"the saved position in {self.path} is incomplete: streams {missing} are missing")
        times = before.get(MICRO_BATCH, self._settings[MICRO_BATCH]) // self._settings[MICRO_BATCH]
        if times > 1 and dp_rank == 0:
            logger.info(SMALLER_MICRO_BATCHES, self._settings[MICRO_BATCH], before[MICRO_BATCH])
        return result.scaled(times)

    def _restore(self, streams: dict[int, Stream], positions: dict[int, dict[str, Any]]) -> None:
        """Set this rank's streams to their positions; one without has not returned a batch yet."""
        try:
            for index, stream in streams.items():
                if index in positions:
                    stream.restore(positions[index])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"the saved position in {self.path} cannot be restored: {error!r}") from error


def _log_start(
    leaves: Sequence[Path | EPath],
    data: DataConfig,
    assets: Assets,
    augmentation: Augmentation | None,
    opened: OpenedData,
    dp_size: int,
) -> None:
    """Log what the first rank says about the data at the start."""
    log_origin(leaves, assets.chat.fingerprint)
    warn_of_other_pixels(leaves, assets.pixel_ranges)
    if (line := limit_line(data)) is not None:
        logger.info(line)
    moving = [] if augmentation is None else augmentation.warnings
    unread = [f"{path}: no sample of it is read, since its weight in the blend is 0" for path in opened.unread]
    of_ranks = warnings_of_ranks(opened.num_streams, dp_size)
    for warning in [*unread, *warnings_of_large_media(data, assets), *of_ranks, *moving]:
        logger.warning(warning)


def _turns_of(rank: RankReads, num_streams: int, num_batches: dict[int, int]) -> StreamTurns:
    """Return the turns of a rank, after the batches that the streams have returned.

    Other ranks take batches of the same streams, if these cannot be divided evenly.
    """
    counted = streams_to_count(num_streams, rank.dp_rank, rank.dp_size)
    shared = () if num_streams % rank.dp_size == 0 else (rank.dp_rank, rank.dp_size)
    return StreamTurns({n: num_batches.get(n, 0) for n in counted}, *shared)


def _most_tiles(data: DataConfig, assets: Assets) -> int:
    """Return the approximate maximum number of tiles of a sample or pack."""
    limit = data.seq_length // assets.plan.tokens_per_tile
    if data.max_media_tokens is not None:
        limit = min(limit, data.max_media_tokens // assets.plan.patches_per_tile)
    return limit


def _most_bytes(data: DataConfig, assets: Assets) -> int:
    """Return how many bytes the tiles of a sample have at most."""
    return _most_tiles(data, assets) * assets.plan.rows_per_tile * assets.images.num_bytes


def _serve(
    streams: dict[int, Stream],
    turns: StreamTurns,
    data: DataConfig,
    seed: int,
    buffer_bytes: int,
    num_micro_batches: int,
) -> dict[int, BatchSource]:
    """Return the source of each stream's deliveries: loader processes, or this process.

    Args:
        turns: of this rank, at the first that it has not had; every process gets a copy.
    """
    num_workers = data.num_workers
    if num_workers > len(streams):
        text = "this rank reads %d of the data's streams (data.num_streams): %d of its %d loader processes have work"
        logger.info(text, len(streams), len(streams), num_workers)
    sources: dict[int, BatchSource] = {}
    shares = share(list(streams), max(1, num_workers))
    num_ahead = max(MIN_PREFETCH, math.ceil(num_micro_batches / len(shares)))
    for indices in shares:
        buffers = PixelBuffers(buffer_bytes, num_ahead) if num_workers else None
        server = StreamServer({n: streams[n] for n in indices}, turns.copy(), buffers)
        source = BatchSource(server, in_process=num_workers == 0, seed=seed, timeout=data.timeout, num_ahead=num_ahead)
        sources |= dict.fromkeys(indices, source)
    return sources
