"""Reads samples by their numbers and tokenizes them; one that cannot be used is skipped and reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megatron.energon import SkipSample
from megatron.energon.source_info import SourceInfo

from llava_mcore.data.encode.augment import ImageKey
from llava_mcore.data.loader.datasets import Dataset
from llava_mcore.data.loader.sample_problems import DATA_ERRORS, MEMORY_ADVICE, Skips, origin_of, sources_of
from llava_mcore.data.loader.task_encoder import ChatTaskEncoder
from llava_mcore.data.order.stream_order import ChosenSample
from llava_mcore.data.samples import EncodedSample, TokenConversation, TokenSample
from llava_mcore.data.storage.remote import storage_message
from llava_mcore.errors import DataError, LlavaMcoreError, problems

MOST_IN_A_ROW = 100
"""Unusable samples in a row that end the reading of endless data: more would probably follow forever."""
SHOWN_SKIPS = 10
PROGRAM_FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError)
"""Errors that say nothing about the data. They end the run, and the message names the sample."""
SYSTEM_FAULTS = (ImportError, MemoryError, RecursionError)
"""Errors of the system. They end the run too, with advice."""
SAMPLE_ERRORS = (*DATA_ERRORS, *PROGRAM_FAULTS, *SYSTEM_FAULTS, LlavaMcoreError)


class KeptSamples:
    """Tokenized samples that wait for their pack, up to a number of bytes; the rest are read again when needed."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._samples: dict[ChosenSample, TokenSample] = {}

    def put(self, choice: ChosenSample, sample: TokenSample) -> None:
        """Keep a sample if there is room for it."""
        size = sample.num_bytes
        if choice not in self._samples and self.num_bytes + size <= self.max_bytes:
            self._samples[choice] = sample
            self.num_bytes += size

    def take(self, choice: ChosenSample) -> TokenSample | None:
        """Return a sample and forget it; None if it was not kept."""
        sample = self._samples.pop(choice, None)
        if sample is not None:
            self.num_bytes -= sample.num_bytes
        return sample


class SampleReader:
    """The samples of all datasets of a data path."""

    def __init__(
        self,
        datasets: Sequence[Dataset],
        encoder: ChatTaskEncoder,
        *,
        name: str,
        max_kept_bytes: int,
        most_in_a_row: int | None = MOST_IN_A_ROW,
    ) -> None:
        """Nothing is read yet.

        Args:
            name: of the data, for messages.
            max_kept_bytes: samples that wait for their pack take at most this memory in a process.
            most_in_a_row: unusable samples in a row after which reading ends; None: any number.
        """
        self.datasets, self.encoder = datasets, encoder
        self._name = name
        self.waiting = KeptSamples(max_kept_bytes)
        self._most_in_a_row = most_in_a_row
        self.num_broken = 0
        """Samples, and packs, that could not be used; without those that split.yaml excludes."""

    @property
    def skips(self) -> Skips:
        """Samples skipped since they were last taken."""
        return self.encoder.skips

    def measure(self, choice: ChosenSample) -> TokenSample | None:
        """Return a tokenized sample, and keep it for `tokens` if there is room; None if it was skipped."""
        sample = self.tokens(choice)
        if sample is not None:
            self.waiting.put(choice, sample)
        return sample

    def tokens(self, choice: ChosenSample) -> TokenSample | None:
        """Return a tokenized sample; None if it was skipped.

        Raises:
            DataError: it must not be skipped (data.on_too_long), or the storage fails for good.
        """
        before = self.waiting.take(choice)
        if before is not None:
            return before
        dataset = self.datasets[choice.dataset]
        index = dataset.shards[0].first + choice.sample
        try:
            parts = dataset.raw(index)
        except RuntimeError as error:
            message = storage_message(error)
            if message is None:
                raise
            raise DataError(f"{self._name} cannot be read: {message}") from error
        if parts is None:
            return None
        try:
            stored = dataset.stored(index, self.encoder.assets.chat.fingerprint)
            sample = None if stored is None else self.encoder.stored_sample(parts.data[0], stored, dataset.subflavors)
            if sample is None:
                sample = self.encoder.preencode_sample(dataset.chat(dataset.decode(parts)))
        except SAMPLE_ERRORS as error:
            self._skip(error, parts, [])
            return None
        return self._marked(choice, sample)

    def encode(self, sample: TokenSample) -> EncodedSample | None:
        """Decode the media of a sample or pack; None if none of its conversations can be used."""
        try:
            return self.encoder.postencode_sample(sample)
        except SkipSample:
            self.num_broken += 1
            return None
        except SAMPLE_ERRORS as error:
            self._skip(error, sample, list(sample.__sources__ or ()))
            return None

    def _skip(self, error: Exception, sample: Any, sources: list[SourceInfo]) -> None:
        message = storage_message(error)
        if message is not None:
            raise DataError(f"{self._name} cannot be read: {message}") from error
        if isinstance(error, SYSTEM_FAULTS):
            hint = f"; {MEMORY_ADVICE}" if isinstance(error, MemoryError) else ""
            reason = f"{type(error).__name__}: {error}".removesuffix(": ")
            where = origin_of(sources_of(sample, sources))
            raise DataError(f"{self._name} cannot be read: {reason}{hint}. {where}") from error
        self.num_broken += 1
        self.skips(error, sample, sources)

    def _marked(self, choice: ChosenSample, sample: TokenSample) -> TokenSample:
        """Return the sample with its dataset, if there are several, and with the draws of its images and videos
        fixed; they are decoded much later."""
        augmentation = self.encoder.augmentation
        if self.encoder.of_blend:
            sample = replace(sample, conversations=[replace(x, dataset=choice.dataset) for x in sample.conversations])
        if augmentation is None:
            return sample

        def with_draws(conversation: TokenConversation) -> TokenConversation:
            where = (self.encoder.seed, choice.dataset, conversation.key, choice.pass_index)
            media = [
                replace(item, augment=partial(augmentation, key=ImageKey(*where, index)))
                for index, item in enumerate(conversation.media)
            ]
            return replace(conversation, media=tuple(media))

        return replace(sample, conversations=[with_draws(x) for x in sample.conversations])

    def check_progress(self, num_in_a_row: int, num_broken: int) -> None:
        """Raise DataError if so many samples in a row cannot be used that no more should be tried.

        Args:
            num_in_a_row: including those that split.yaml excludes.
            num_broken: of these, those that are broken.
        """
        if self._most_in_a_row is None:
            return
        if num_broken >= self._most_in_a_row:
            last = [str(skip) for skip in self.skips.take()[-SHOWN_SKIPS:]]
            raise DataError(problems(f"{num_broken} samples in a row cannot be used; the last ones", last))
        if num_in_a_row >= sum(dataset.num_samples for dataset in self.datasets) and not num_broken:
            raise DataError(f"{self._name}: split.yaml excludes all samples")
