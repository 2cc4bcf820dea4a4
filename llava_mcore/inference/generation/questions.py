"""The questions of a prepared dataset, each with the answer that is expected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.encode.marks import count_marks, unescape
from llava_mcore.data.loader.datasets import open_datasets
from llava_mcore.data.loader.sample_problems import DATA_ERRORS, Skips
from llava_mcore.data.loader.source import reading
from llava_mcore.data.loader.task_encoder import ChatTaskEncoder
from llava_mcore.data.samples import AUDIO_MARK, IMAGE_MARK, VIDEO_MARK, Conversation, Skip, Turn
from llava_mcore.data.storage.dataset_path import check_dataset
from llava_mcore.errors import DataError


@dataclass(frozen=True)
class Question:
    """A conversation that ends with a question. `reference`: the answer to it in the data.

    `position`: the number of its sample, of the conversation in the sample, and of the answer in the conversation.
    """

    position: tuple[int, int, int]
    key: str
    conversation: Conversation
    reference: str

    @property
    def text(self) -> str:
        """The question itself, with the marks of its images."""
        return self.conversation.turns[-1].text


class Questions:
    """The questions of a split of a dataset, read by the numbers of the samples: nothing is shuffled or packed."""

    def __init__(
        self,
        path: Path | str,
        assets: Assets,
        *,
        split: str,
        seed: int = 0,
        most_samples: int | None = None,
        every_answer: bool = False,
    ) -> None:
        """Open the data; no sample is read yet.

        Args:
            seed: chooses prompts if a dataset has a pool of them, as in validation.
            most_samples: samples to read, evenly distributed over the part; None: all.
            every_answer: ask for every answer of a conversation, after the true answers before it; otherwise for the
                last one only.

        Raises:
            DataError: the data is not prepared, or does not have this part.
        """
        # Samples are encoded as in training.
        self.path, self.every_answer = path, every_answer
        check_dataset(path, split)
        self._skips = Skips(stop_if_too_long=False)
        data = DataConfig(path=path, max_sample_bytes=assets.limits.sample_bytes)
        self._encoder = ChatTaskEncoder(data, assets, self._skips, seed=seed)
        with reading(path, data.timeout):
            self._datasets = open_datasets(path, max_sample_bytes=data.max_sample_bytes, split=split)
        # The chosen samples do not depend on the seed: they are spread evenly over all datasets.
        total = sum(data.num_samples for data in self._datasets)
        if not total:
            raise DataError(f"the part {split} of {path} has no samples")
        num_asked = min(total, total if most_samples is None else most_samples)
        self.indices = [i * total // num_asked for i in range(num_asked)]
        """Indices of the samples."""

    def read(self, indices: Sequence[int]) -> Iterator[Question | Skip]:
        """Yield the questions of some samples in their order; or why a sample cannot be used.

        Raises:
            DataError: a shard cannot be read at all.
        """
        for index in indices:
            with reading(self.path, 0):
                questions = self._read(index)
            yield from questions

    def _read(self, index: int) -> list[Question | Skip]:
        first = 0
        for data in self._datasets:
            if index < first + data.num_samples:
                break
            first += data.num_samples
        inside = data.shards[0].first + index - first
        shard = data.shard_of(inside)
        try:
            parts = data.raw(inside)
            if parts is None:  # split.yaml excludes it
                return []
            chat = data.chat(data.decode(parts))
        except (*DATA_ERRORS, DataError) as error:
            return [Skip(f"{data.path}: shard {shard.name}, sample number {inside - shard.first}", str(error))]
        single = len(chat.conversations) == 1
        questions: list[Question | Skip] = []
        for member, conversation in enumerate(chat.conversations):
            key = chat.__key__ if single else f"{chat.__key__}#{member}"
            asked = self._encoder.prompted(chat, conversation, key)
            questions += self._questions(asked, key, index, member)
        return questions

    def _questions(self, conversation: Conversation, key: str, sample_index: int, member: int) -> list[Question]:
        turns = conversation.turns
        # A turn that only calls tools has no text to compare with.
        answers = [index for index, turn in enumerate(turns) if turn.role == "assistant" and turn.text.strip()]
        if not answers:
            return []
        chosen = list(enumerate(answers)) if self.every_answer else [(len(answers) - 1, answers[-1])]
        return [
            Question(
                (sample_index, member, which),
                key if which == len(answers) - 1 else f"{key}@{which}",
                before_answer(conversation, index),
                unescape(turns[index].text.strip()),
            )
            for which, index in chosen
        ]


def before_answer(conversation: Conversation, index: int) -> Conversation:
    """Return the turns of a conversation before turn `index`, with their images and videos."""
    turns: tuple[Turn, ...] = conversation.turns[:index]
    num_images, num_videos, num_audios = (count_marks(turns, mark) for mark in (IMAGE_MARK, VIDEO_MARK, AUDIO_MARK))
    images, videos = conversation.images[:num_images], conversation.videos[:num_videos]
    audios = conversation.audios[:num_audios]
    return replace(conversation, turns=turns, images=images, videos=videos, audios=audios, tokens=None)
