"""Lets the model of a run answer questions of the validation split, without any effect on training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from llava_mcore.config.rules.all_rules import pad_multiple
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.samples import Skip
from llava_mcore.errors import DataError, LlavaMcoreError
from llava_mcore.inference.generation.generate import generate
from llava_mcore.inference.generation.questions import Question, Questions
from llava_mcore.inference.generation.records import PromptQueue, Record
from llava_mcore.inference.generation.settings import Settings, TokenSampling, read_settings, require_known
from llava_mcore.parallel.groups import gather_to_all
from llava_mcore.parallel.together import raise_listed, raise_together
from llava_mcore.processes.watchdog import Watchdog
from llava_mcore.training.answers.result import AnswersResult, Example, scored
from llava_mcore.training.setup import Trainer
from llava_mcore.training.validation import without_side_effects


class AnswerData(NamedTuple):
    """Assets and questions, on a rank that loads data."""

    assets: Assets
    questions: Questions


class Answerer:
    """Asks questions every so many iterations; all methods except `due` are collective calls.

    Replica r of n asks for samples r, r + n, …, with a fixed batch size, so the answers do not depend on the number of
    replicas.
    """

    def __init__(self, trainer: Trainer, data: AnswerData | None, hf_dir: Path, watchdog: Watchdog) -> None:
        """Read the settings of generation.

        Args:
            data: on ranks that load data, if the run asks questions.
            hf_dir: folder with generation_config.json.

        Raises:
            ConversionError, ConfigError: that file cannot be used.
        """
        self.trainer, self.data, self.watchdog = trainer, data, watchdog
        self.config = trainer.run.validation
        self._settings = self._read_settings(hf_dir) if self.config.eval_generate is not None else None

    def _read_settings(self, hf_dir: Path) -> Settings:
        eos = None if self.data is None else self.data.assets.eos_token_id
        known = [x for x in gather_to_all(self.trainer.groups, eos) if x is not None]
        settings = read_settings(
            hf_dir,
            self.trainer.hf,
            known[0],
            max_new_tokens=self.config.eval_generate_max_new_tokens,
            sampling=TokenSampling(),
        )
        require_known(settings, hf_dir)
        return settings.within(self.trainer.models[0].window)

    def due(self, iteration: int, *, is_last: bool) -> bool:
        """Return whether questions are asked after this iteration."""
        interval = self.config.eval_generate
        return interval is not None and (iteration % interval == 0 or is_last)

    def run(self, iteration: int) -> AnswersResult:
        """Ask all questions once; the result on rank 0 has the examples.

        Raises:
            DataError: on all ranks, if any cannot read the data.
            LlavaMcoreError: on all ranks, if rank 0 cannot score the answers, or read the examples once more.
        """
        start = time.perf_counter()
        groups = self.trainer.groups
        # A rank that cannot read its questions tells the others, which would wait for it.
        problem, asked = None, None
        try:
            asked = self._ask(iteration)
        except LlavaMcoreError as error:
            problem = str(error)
        raise_listed(groups, problem, DataError, "questions of the validation split cannot be asked")
        # Each replica has answered some of the questions; rank 0 scores all of them.
        gathered = gather_to_all(groups, [] if asked is None else asked.records)
        records = sorted((x for part in gathered for x in part), key=lambda record: (record.position, record.key))
        num_skipped = sum(record.problem is not None for record in records)
        metrics, examples = raise_together(groups, lambda: self._first_ranks(records))
        return AnswersResult(
            iteration=iteration,
            metrics=metrics,
            num_answers=len(records) - num_skipped,
            num_skipped=num_skipped,
            seconds=time.perf_counter() - start,
            records=records,
            examples=examples,
        )

    def _first_ranks(self, records: list[Record]) -> tuple[dict[str, float | None], list[Example]]:
        """Return the metrics and examples on rank 0, and empty ones on others."""
        if self.trainer.groups.rank != 0:
            return {}, []
        return scored(records), self._examples(records)

    def _ask(self, iteration: int) -> PromptQueue | None:
        """Return what this replica was asked, on the rank that loads its data."""
        assert self._settings is not None
        trainer, groups = self.trainer, self.trainer.groups
        multiple = pad_multiple(trainer.run)
        asked = None
        if self.data is not None:
            asked = PromptQueue(self._own_questions(self.data), self.data.assets, self._settings, multiple=multiple)
        with without_side_effects(trainer):
            answers = generate(
                trainer.models,
                groups,
                None if asked is None else asked.prompts(),
                self._settings,
                trainer.fields,
                num_rows=self.config.eval_generate_batch_size,
                multiple=multiple,
            )
            self.watchdog.begin(f"answers after iteration {iteration}")
            for answer in answers:
                self.watchdog.begin(f"answers after iteration {iteration}, after {answer.index}")
                if asked is not None:
                    asked.answered(answer.index, answer.tokens)
        return asked

    def _own_questions(self, data: AnswerData) -> Iterator[Question | Skip]:
        groups = self.trainer.groups
        return data.questions.read(data.questions.indices[groups.dp_rank :: groups.dp_size])

    def _examples(self, records: list[Record]) -> list[Example]:
        """Return the first of the records with their images, which are read once more."""
        assert self.data is not None, "rank 0 loads data"
        by_position = {record.position: record for record in records if record.answer is not None}
        positions = list(by_position)[: self.config.eval_generate_examples]
        indices = list(dict.fromkeys(position[0] for position in positions))
        asked = {x.position: x for x in self.data.questions.read(indices) if isinstance(x, Question)}
        media = {position: asked[position].conversation for position in positions if position in asked}
        first = {position: [*x.images, *x.frames][:1] for position, x in media.items()}
        return [Example(by_position[position], images[0] if images else None) for position, images in first.items()]
