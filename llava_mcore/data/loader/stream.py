"""One stream of a run's data: its samples, its packs, its batches, and its position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

from torch.utils.data import IterableDataset

from llava_mcore.data.loader.packing import PatchBudget, fullest_pack, is_filled, round_up
from llava_mcore.data.loader.sample_reader import SampleReader
from llava_mcore.data.loader.source import Delivery, PixelBuffers
from llava_mcore.data.loader.turns import StreamTurns
from llava_mcore.data.order.stream_order import ChosenSample, Progress
from llava_mcore.data.samples import Batch, EncodedSample, Skip, TokenSample
from llava_mcore.media.batch_fields import PIXEL_VALUES


@dataclass(frozen=True)
class Packing:
    """How a stream packs."""

    buffer_size: int
    """Samples among which those of a pack are chosen; more if these would not fill it (`is_filled`)."""
    capacity: int
    """Maximum tokens of a pack."""
    most_patches: int | None = None
    """Maximum patches of a pack."""
    multiple: int = 1
    """Multiple that the length of each conversation is rounded up to."""

    def room(self, num_tokens: int, num_conversations: int) -> int:
        """Return how much of a pack a sample takes; where it has several conversations, at most."""
        padding = (num_conversations - 1) * (self.multiple - 1)
        return min(round_up(num_tokens + padding, self.multiple), self.capacity)


class SampleOrder(Protocol):
    """Which sample comes next."""

    def next(self, progress: Progress) -> ChosenSample | None:
        """Return the next sample; None at the end."""
        ...

    def position(self) -> Any:
        """Return the position after it, as plain containers."""
        ...

    def restore(self, position: Any) -> None:
        """Continue from a position. KeyError, TypeError or ValueError if it is not one of this data."""
        ...


class Waiting(NamedTuple):
    """A sample that waits for its pack: its numbers and size, not its contents."""

    choice: ChosenSample
    num_tokens: int
    num_patches: int
    num_conversations: int = 1


class Stream:
    """Batches of one stream, endless in training.

    The position is a few numbers: what was chosen of each dataset, and which samples wait for their pack. So a stream
    continues exactly where it was saved, without reading anything again that was used before.
    """

    def __init__(
        self,
        order: SampleOrder,
        reader: SampleReader,
        *,
        batch_size: int,
        packing: Packing | None,
        num_streams: int = 1,
        first_iteration: float = 0.0,
        iterations_after: Callable[[int], float] = lambda num_batches: 0.0,
    ) -> None:
        """Start at the beginning; nothing is read yet.

        Args:
            batch_size: rows of a batch.
            packing: None if a row is one sample.
            num_streams: streams of the run, which all have about as many tokens.
            first_iteration: iterations before the first batch.
            iterations_after: iterations between a batch of a stream and the next one; its argument is their number
                before.
        """
        self._order, self._reader = order, reader
        self._batch_size, self._packing = batch_size, packing
        self._waiting: list[Waiting] = []
        self._num_batches = 0
        self._num_tokens = 0
        self._num_in_a_row = self._num_broken = 0
        self._num_streams, self._iterations_after = num_streams, iterations_after
        self._num_iterations = first_iteration

    def position(self) -> dict[str, Any]:
        """Return the position after the last batch, as plain containers."""
        waiting = [[*entry.choice, *entry[1:]] for entry in self._waiting]
        counts: dict[str, float] = {"num_batches": self._num_batches, "num_tokens": self._num_tokens}
        counts |= {"num_iterations": self._num_iterations}
        return {"order": self._order.position(), "waiting": waiting, **counts}

    def restore(self, position: dict[str, Any]) -> None:
        """Continue from a position. KeyError, TypeError or ValueError if it is not one of this data."""
        self._order.restore(position["order"])
        self._waiting = [Waiting(ChosenSample(*entry[:3]), *entry[3:]) for entry in position["waiting"]]
        self._num_batches, self._num_tokens = position["num_batches"], position["num_tokens"]
        self._num_iterations = position["num_iterations"]

    def batch(self, index: int) -> Batch | None:
        """Return the batch of a number, counted from 0, and drop those before it; None at the end of the data.

        Errors like the next one's.
        """
        while self._num_batches < index:
            self._next()
        return self._next()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the next batch; the last one, which only validation has, may have fewer rows.

        Raises:
            StopIteration: the data has ended.
            DataError: too many samples in a row are broken, or the storage fails for good.
        """
        batch = self._next()
        if batch is None:
            raise StopIteration
        return batch

    def take_skips(self) -> list[Skip]:
        """Return the samples skipped since the last batch, after a stream has ended."""
        return self._reader.skips.take()

    def _next(self) -> Batch | None:
        """Return the next batch; None at the end of the data."""
        rows: list[EncodedSample] = []
        self._broken_before = self._reader.num_broken  # other streams of the process use the reader too
        while len(rows) < self._batch_size:
            tokens = self._next_sample() if self._packing is None else self._next_pack(self._packing)
            if tokens is None:
                break
            row = self._reader.encode(tokens)
            self._count(row is not None)
            if row is not None:
                rows.append(row)
        if not rows:
            return None
        batch = self._reader.encoder.batch(rows)
        batch.skipped = self._reader.skips.take()
        self._num_iterations += self._iterations_after(self._num_batches)
        self._num_batches += 1
        self._num_tokens += batch.num_tokens
        return batch

    def _progress(self) -> Progress:
        """Return how far the run is, as far as this stream can tell."""
        return Progress(self._num_iterations, self._num_tokens * self._num_streams)

    def _next_sample(self) -> TokenSample | None:
        """Return the next sample that can be used; None at the end of the data."""
        while (choice := self._order.next(self._progress())) is not None:
            sample = self._reader.tokens(choice)
            if sample is not None:
                return sample
            self._count(usable=False)
        return None

    def _next_pack(self, packing: Packing) -> TokenSample | None:
        """Return the fullest pack of the waiting samples that has the oldest one; None at the end of the data.

        The buffer is filled again after every pack: emptying it first would leave its last packs half empty.
        """
        while True:
            self._fill(packing)
            if not self._waiting:
                return None
            samples = [self._reader.tokens(entry.choice) for entry in self._take_pack(packing)]
            usable = [sample for sample in samples if sample is not None]
            if usable:
                return _joined(usable)
            self._count(usable=False)

    def _fill(self, packing: Packing) -> None:
        """Let as many samples wait as the buffer holds, or as there are."""
        num_tokens = sum(entry.num_tokens for entry in self._waiting)
        failed_packs = self._num_in_a_row, self._num_broken
        while not is_filled(len(self._waiting), num_tokens, packing.buffer_size, packing.capacity):
            choice = self._order.next(self._progress())
            if choice is None:
                return
            sample = self._reader.measure(choice)
            if sample is None:
                self._count(usable=False)
            else:
                sizes = (sample.num_tokens, sample.num_patches, len(sample.conversations))
                self._waiting.append(Waiting(choice, *sizes))
                num_tokens += sample.num_tokens
                # Those before it are not in a row with those after it. Whether its media can be decoded is not known.
                self._num_in_a_row, self._num_broken = failed_packs

    def _take_pack(self, packing: Packing) -> list[Waiting]:
        """Remove the samples of the next pack from those that wait, and return them."""
        media = None
        if packing.most_patches is not None:
            media = PatchBudget([entry.num_patches for entry in self._waiting], packing.most_patches)
        room = [packing.room(entry.num_tokens, entry.num_conversations) for entry in self._waiting]
        chosen = fullest_pack(room, packing.capacity, media)
        taken = [self._waiting[index] for index in chosen]
        for index in reversed(chosen):
            del self._waiting[index]
        return taken

    def _count(self, usable: bool) -> None:
        """Count the samples in a row that cannot be used."""
        if usable:
            self._num_in_a_row = self._num_broken = 0
        else:
            self._num_in_a_row += 1
            self._num_broken += self._reader.num_broken - self._broken_before
            self._reader.check_progress(self._num_in_a_row, self._num_broken)
        self._broken_before = self._reader.num_broken


def _joined(samples: list[TokenSample]) -> TokenSample:
    """Return a pack as one sample."""
    return TokenSample(
        __key__="+".join(sample.__key__ for sample in samples),
        __restore_key__=(),
        __sources__=tuple(source for sample in samples for source in sample.__sources__ or ()),
        conversations=[conversation for sample in samples for conversation in sample.conversations],
        num_tokens=sum(sample.num_tokens for sample in samples),
        num_patches=sum(sample.num_patches for sample in samples),
    )


class StreamServer(IterableDataset[Delivery]):
    """Yields the deliveries of one loader process: its streams, in the order of all streams of the rank."""

    def __init__(self, streams: dict[int, Stream], turns: StreamTurns, buffers: PixelBuffers | None) -> None:
        """streams: the streams of this process; turns: the order of all streams of the rank; buffers: None in the
        training process."""
        self.streams = streams
        self.buffers = buffers
        self._turns = turns

    def __iter__(self) -> Iterator[Delivery]:
        for stream_index, index in self._turns:
            if stream_index in self.streams:
                stream = self.streams[stream_index]
                batch = stream.batch(index)
                if batch is None:
                    return
                delivery = Delivery(stream_index, batch, stream.position())
                media = delivery.batch.media
                if self.buffers is not None:
                    delivery.buffered = self.buffers.put(media[PIXEL_VALUES])
                if delivery.buffered is not None:
                    media[PIXEL_VALUES], delivery.buffers = media[PIXEL_VALUES][:0], self.buffers
                yield delivery
