"""The endless stream of micro-batches of one data-parallel rank, and its place."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encoding.assets import Assets
from llava_mcore.data.encoding.stored_tokens import log_origin
from llava_mcore.data.loading.source import LEAST_AHEAD, Source, reading
from llava_mcore.data.samples import Batch
from llava_mcore.data.storage.dataset_path import check_dataset, fingerprint
from llava_mcore.data.streams.open_stream import check_streams, open_stream
from llava_mcore.data.streams.pixel_buffers import PixelBuffers
from llava_mcore.data.streams.skips import Skips
from llava_mcore.data.streams.streams import (
    RoundRobin,
    Stream,
    StreamServer,
    default_num_streams,
    num_given,
    place_behind,
    scaled,
    share,
    streams_of_rank,
)
from llava_mcore.data.streams.task_encoder import ChatTaskEncoder
from llava_mcore.errors import DataError, problems

logger = logging.getLogger(__name__)

MICRO_BATCH = "training.micro_batch_size"
FORMAT = 3


class TrainLoader:
    """Batches of one data-parallel rank, for ever, in an order fixed by seed, data, streams and micro-batch size.

    What the ranks read together is the same for every number of ranks and of loader processes (see `streams`), as
    long as the number of ranks divides both the number of streams and that of a step's micro-batches; otherwise only
    the order differs.

    A broken sample is left out and reported in `Batch.skipped`; whatever else fails raises DataError.
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
        saved: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        """Open the data, at the beginning or behind a saved place; nothing is read before the first batch.

        Args:
            pad_multiple: what the tokens of a micro-batch are padded to a multiple of.
            num_micro_batches: of this rank in a step. A step takes all of them before it begins, so loader processes
                make as many while the step before is computed.
            saved: what `state` returned on every rank of the run that is continued, however many they were.

        Raises:
            DataError: data that are not prepared; a place that does not belong to these data and settings.
        """
        leaves = check_dataset(data.path)
        _check_media_budget(data, assets)
        assert data.path is not None
        self.path: Path | str = data.path
        self._timeout = data.timeout
        self._settings = _settings_to_resume_with(data, self.path, seed, micro_batch_size)
        places = self._take_over(saved) if saved is not None else {}

        def open_one(number: int, num_streams: int, batch_size: int) -> Stream:
            skips = Skips(stop_if_too_long=data.on_too_long == "error")
            encoder = ChatTaskEncoder(data, assets, skips, seed=seed, pad_multiple=pad_multiple)
            return open_stream(number, num_streams, data, encoder, batch_size)

        with reading(self.path, self._timeout):
            if self.num_streams is None:
                num_samples = open_one(0, 1, 1).dataset.len_worker(0)
                self._settings["data.num_streams"] = default_num_streams(dp_size, data.num_workers, num_samples)
            numbers = streams_of_rank(self.num_streams, dp_rank, dp_size)
            streams = {n: open_one(n, self.num_streams, micro_batch_size) for n in numbers}
            check_streams(streams, self.num_streams, leaves)
            if dp_rank == 0:
                log_origin(leaves, assets.chat.fingerprint)
            self._restore(streams, places)
        self._places = {n: places.get(n) for n in numbers}
        num_batches = {n: 0 if place is None else num_given(place) for n, place in self._places.items()}
        self._turns = iter(RoundRobin(num_batches))
        buffer_bytes = (
            micro_batch_size * _most_tiles(data, assets) * assets.plan.rows_per_tile * assets.images.num_bytes
        )
        self._sources = _serve(streams, num_batches, data, seed, buffer_bytes, num_micro_batches)
        self._closed = False
        self._handling = assets.chat.special_tokens_in_text
        self._told: set[str] = set()

    @property
    def num_streams(self) -> int:
        """Streams that the data are divided into, over all ranks."""
        return self._settings["data.num_streams"]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the next micro-batch. DataError if the data cannot be read; the loader is closed then."""
        if self._closed:
            raise DataError(f"the loader of {self.path} is closed")
        stream = next(self._turns)
        try:
            with reading(self.path, self._timeout):
                delivery = self._sources[stream].next()
        except StopIteration:
            self.close()
            raise DataError(f"{self.path}: the data ended") from None
        except DataError:
            self.close()
            raise
        assert delivery.stream == stream
        self._places[stream] = place_behind(self._places[stream], delivery)
        self._tell_typed(delivery.batch.typed_tokens)
        return delivery.batch

    def state(self) -> dict[str, Any]:
        """Return this rank's place behind the last batch taken, as plain containers and tensors.

        `torch.save` it, one for each data-parallel rank; `torch.load(…, weights_only=True)` reads it.
        """
        return {"format": FORMAT, "settings": self._settings, "streams": dict(self._places)}

    def _tell_typed(self, found: dict[str, str]) -> None:
        """Warn of every special token that stands in the text of samples, when the first of them comes."""
        for token, key in found.items():
            if token not in self._told:
                self._told.add(token)
                what = "kept as plain text" if self._handling == "text" else "taken for the token itself"
                logger.warning(
                    "%s: the text of sample %s holds the special token %s; it is %s wherever it stands in the text "
                    "(data.special_tokens_in_text)", self.path, key, token, what
                )  # fmt: skip

    def close(self) -> None:
        """End the loader processes. Calling it again does nothing."""
        self._closed = True
        for source in set(self._sources.values()):
            source.close()
        self._sources = {}

    def _take_over(self, saved: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any] | None]:
        """Return the place of every stream of a saved run, whose number of streams is taken over.

        Raises DataError that lists every setting in which this loader differs from the one that was saved.
        """
        if not saved or any(not isinstance(s, dict) or s.get("format") != FORMAT for s in saved):
            raise DataError(f"this is no place in the data that this version saved (expected format {FORMAT})")
        before = saved[0]["settings"]
        if self.num_streams is None:
            self._settings["data.num_streams"] = before["data.num_streams"]
        found = _differences(before, self._settings)
        if found:
            advice = "resume with the same settings, or start the data anew (without --load-optim)"
            raise DataError(problems(f"the saved place does not belong to this loader of {self.path}; {advice}", found))
        times = before.get(MICRO_BATCH, self._settings[MICRO_BATCH]) // self._settings[MICRO_BATCH]
        places = {n: scaled(place, times) for state in saved for n, place in state["streams"].items()}
        missing = sorted(set(range(before["data.num_streams"])) - set(places))
        if missing:
            raise DataError(f"the saved place in {self.path} is not complete: streams {missing} are missing")
        return places

    def _restore(self, streams: dict[int, Stream], places: dict[int, dict[str, Any] | None]) -> None:
        for number, stream in streams.items():
            place = places.get(number)
            if place is None:
                continue  # it had not given a batch yet
            try:
                stream.restore(place)
            except (KeyError, TypeError, AttributeError, AssertionError) as error:
                raise DataError(f"the saved place in {self.path} cannot be restored: {error!r}") from error


def _settings_to_resume_with(data: DataConfig, path: Path | str, seed: int, micro_batch_size: int) -> dict[str, Any]:
    """Return what decides the order of the samples, by the names that messages use; None where it decides nothing."""
    return {
        "data.num_streams": data.num_streams,
        "data.shuffle_buffer_size": data.shuffle_buffer_size,
        "data.packing": data.packing,
        "data.packing_buffer_size": data.packing_buffer_size if data.packing else None,
        "data.seq_length": data.seq_length if data.packing else None,
        "data.max_media_tokens": data.max_media_tokens if data.packing else None,
        MICRO_BATCH: micro_batch_size,
        "training.seed": seed,
        "data.special_tokens_in_text": data.special_tokens_in_text,
        "megatron-energon": version("megatron-energon"),
        "data (made by energon prepare)": fingerprint(path),
    }


def _check_media_budget(data: DataConfig, assets: Assets) -> None:
    least = assets.plan.patches_per_tile
    if data.max_media_tokens is not None and data.max_media_tokens < least:
        raise DataError(
            f"data.max_media_tokens is {data.max_media_tokens}, but the smallest picture has {least} patches: raise or "
            "omit it"
        )


def _most_tiles(data: DataConfig, assets: Assets) -> int:
    """Return about how many tiles a sample or pack has at most."""
    most = data.seq_length // assets.plan.tokens_per_tile
    if data.max_media_tokens is not None:
        most = min(most, data.max_media_tokens // assets.plan.patches_per_tile)
    return most


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return in what the settings of a saved place keep it from being taken over.

    A place is counted in micro-batches: of smaller ones that they can be cut into there are so many times more.
    """
    found = [
        f"{name}: saved with {before[name]}, now {now.get(name)}"
        for name in before
        if name != MICRO_BATCH and before[name] != now.get(name) and None not in (before[name], now.get(name))
    ]
    size = before.get(MICRO_BATCH, now[MICRO_BATCH])
    if size % now[MICRO_BATCH]:
        fitting = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        found.append(f"{MICRO_BATCH}: saved with {size}, now {now[MICRO_BATCH]}; it may become {fitting}")
    return found


def _serve(
    streams: dict[int, Stream],
    num_batches: dict[int, int],
    data: DataConfig,
    seed: int,
    buffer_bytes: int,
    num_micro_batches: int,
) -> dict[int, Source]:
    """Return where each stream's deliveries come from: loader processes, or this process without any."""
    num_workers = data.num_workers
    if num_workers > len(streams):
        logger.info("this rank serves %d streams: %d of %d loader processes", len(streams), len(streams), num_workers)
    sources: dict[int, Source] = {}
    shares = share(list(streams), max(1, num_workers))
    num_ahead = max(LEAST_AHEAD, math.ceil(num_micro_batches / len(shares)))
    for numbers in shares:
        buffers = PixelBuffers(buffer_bytes, num_ahead) if num_workers else None
        server = StreamServer({n: streams[n] for n in numbers}, RoundRobin(num_batches), buffers)
        source = Source(server, in_process=num_workers == 0, seed=seed, timeout=data.timeout, buffers=buffers)
        sources |= dict.fromkeys(numbers, source)
    return sources
