"""Questions with their answers, as they are written and scored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.samples import Skip
from llava_mcore.errors import DataError
from llava_mcore.inference.generation.prompt import Prompt, decoded, encode_prompt
from llava_mcore.inference.generation.questions import Question
from llava_mcore.inference.generation.settings import Settings


@dataclass(frozen=True)
class Record:
    """One question. `answer`: None if it could not be asked, for the reason in `problem`. `num_tokens`: of the answer.

    `position`: see Question; empty for a sample without questions.
    """

    key: str
    question: str
    reference: str | None
    answer: str | None = None
    num_tokens: int = 0
    problem: str | None = None
    position: tuple[int, ...] = ()

    @property
    def is_finished(self) -> bool:
        """Whether it was answered, or cannot be asked."""
        return self.answer is not None or self.problem is not None

    def line(self) -> dict[str, Any]:
        """Return the object of a line of jsonl."""
        values = asdict(self)
        del values["position"]
        if self.problem is None:
            del values["problem"]
        return values


class PromptQueue:
    """Turns questions into prompts and remembers what was asked."""

    def __init__(
        self, questions: Iterable[Question | Skip], assets: Assets, settings: Settings, *, multiple: int = 1
    ) -> None:
        """multiple: prompts are padded to a multiple of this."""
        self._questions, self._assets, self._settings, self._multiple = questions, assets, settings, multiple
        self._entries: list[int] = []  # of each prompt, the index of its record
        self.records: list[Record] = []
        """The records of all questions so far, in their order."""

    def prompts(self) -> Iterator[Prompt]:
        """Yield the prompts of questions that can be asked. DataError if the data cannot be read at all."""
        for question in self._questions:
            if isinstance(question, Skip):
                self.records.append(Record(question.where, "", None, problem=question.reason))
                continue
            record = Record(question.key, question.text, question.reference, position=question.position)
            try:
                prompt = encode_prompt(question.conversation, self._assets, question.key, multiple=self._multiple)
                self._settings.longest_answer(prompt.length)  # raises if there is no room for one
            except DataError as error:
                self.records.append(replace(record, problem=str(error)))
                continue
            self._entries.append(len(self.records))
            self.records.append(record)
            yield prompt

    def answered(self, index: int, tokens: list[int]) -> None:
        """Store the answer to prompt `index`."""
        entry = self._entries[index]
        text = decoded(self._assets, tokens)
        self.records[entry] = replace(self.records[entry], answer=text, num_tokens=len(tokens))
