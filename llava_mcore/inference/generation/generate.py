"""Answers prompts one after another, several at a time: a row that is finished takes the next prompt.

The number of rows is fixed, so that what is computed for a prompt does not depend on how many others there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LogitsProcessorList

from llava_mcore.errors import DataError, LlavaMcoreError
from llava_mcore.inference.generation.cache import cached_rows
from llava_mcore.inference.generation.lockstep import Lockstep, State
from llava_mcore.inference.generation.prompt import Prompt
from llava_mcore.inference.generation.settings import Settings
from llava_mcore.inference.generation.stages import CachedModel
from llava_mcore.media.batch_fields import Fields
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.parallel.batch import MicroBatch
from llava_mcore.parallel.groups import Groups
from llava_mcore.parallel.share import share_step

_STRIDE = 1_000_003
"""Distance between the random generators of two seeds, in prompts: with more, some share random numbers."""


def most_probable(logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the ids int64 [r] of the largest logits; of equal ones the lowest id, as torch.argmax. A collective call.

    Each rank sends one value and one id per row, not its part of the vocabulary.

    Args:
        logits: [r, v / tp], this rank's part.
    """
    values, ids = logits.float().max(dim=-1)
    if group.size() == 1:
        return ids
    ids = ids + group.rank() * logits.shape[-1]
    all_values, all_ids = (_gathered(x, group) for x in (values, ids))  # [tp, r]
    first = all_values.argmax(dim=0, keepdim=True)  # a lower rank has lower ids
    return all_ids.gather(0, first)[0]


def whole_logits(logits: Tensor, vocab_size: int, group: dist.ProcessGroup) -> Tensor:
    """Return float32 logits of the whole vocabulary [r, vocab_size], of parts [r, v / tp]. A collective call."""
    logits = logits.float()
    if group.size() > 1:
        logits = torch.cat(list(_gathered(logits, group)), dim=-1)
    return logits[:, :vocab_size]


def processed_choice(
    logits: Tensor, ids: Tensor, processors: LogitsProcessorList, generator: torch.Generator | None
) -> int:
    """Return the next token of one row.

    Args:
        logits: float32 [1, vocabulary].
        ids: int64 [1, s], prompt and answer so far.
        generator: of the CPU, that samples the token; None: the most probable one is taken.
    """
    scores = processors(ids, logits)
    if generator is None:
        return int(scores.argmax(dim=-1))
    return int(torch.multinomial(scores.softmax(dim=-1).cpu()[0], 1, generator=generator))


def own_generator(seed: int, index: int) -> torch.Generator:
    """Return the generator of one prompt, so that its sampling does not depend on what else is answered."""
    return torch.Generator().manual_seed((seed * _STRIDE + index) % 2**32)  # the CPU's takes 32 bits


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return [tp, ...] of every rank's tensor."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.stack(parts)


@dataclass(frozen=True)
class Answer:
    """The answer to prompt `index` (from 0): its tokens, with the one that ends it if there is one."""

    index: int
    tokens: list[int]


@dataclass
class _PromptRow:
    """A prompt that is being answered. `length`, `position`: of the next token to read. `most_tokens`: of the answer.
    `ids`: int64 [1, s]."""

    index: int
    length: int
    position: int
    most_tokens: int
    ids: Tensor
    processors: LogitsProcessorList
    draws: torch.Generator | None
    tokens: list[int] = field(default_factory=list)


def generate(
    models: Sequence[VisionLanguageModel],
    groups: Groups,
    prompts: Iterator[Prompt] | None,
    settings: Settings,
    fields: Fields,
    *,
    num_rows: int,
    multiple: int = 1,
    graphs: bool = False,
) -> Iterator[Answer]:
    """Yield the answers of one model replica as they are finished; a collective call of the replica's ranks, and of all
    ranks where replicas share experts.

    Args:
        models: the chunks of this rank, in eval mode.
        prompts: on the replica's loading rank, elsewhere None.
        fields: of the prompts' media.
        num_rows: prompts that are answered at the same time.
        multiple: numbers of tokens are padded to a multiple of this; prompts already are.
        graphs: on a GPU, run prompts and passes of single tokens as CUDA graphs; the model must have no hooks that talk
            to other ranks.

    Raises:
        LlavaMcoreError: on all ranks of the replica, if `prompts` raised one. Replicas that share experts with it end
            early.
    """
    with torch.no_grad(), cached_rows(models, num_rows, groups.device) as rows:
        model = CachedModel(models, groups, rows, multiple=multiple, graphs=graphs)
        try:
            yield from _AnswerLoop(model, prompts, settings, fields, num_rows).answers()
        finally:
            model.close()


class _AnswerLoop:
    def __init__(
        self, model: CachedModel, prompts: Iterator[Prompt] | None, settings: Settings, fields: Fields, num_rows: int
    ) -> None:
        self.model, self.prompts, self.settings, self.fields = model, prompts, settings, fields
        self.groups = model.groups
        self.lockstep = Lockstep(model.groups)
        self.rows: list[_PromptRow | None] = [None] * num_rows
        self.num_read, self.has_more, self.others_failed = 0, True, False

    def answers(self) -> Iterator[Answer]:
        """Yield all answers."""
        while self.has_more or any(self.rows):
            for index in range(len(self.rows)):
                yield from self._fill(index)
            if any(self.rows) and self._may_run():
                yield from self._step()
            if self.others_failed:
                return
        # Other replicas may still need this one's experts.
        while self.lockstep.agree(State.DONE) is State.BUSY:
            self._read_tokens()

    def _may_run(self) -> bool:
        """Return whether this replica's next pass comes now; not if another replica has failed."""
        self.others_failed = self.others_failed or self.lockstep.agree(State.BUSY) is State.FAILED
        return not self.others_failed

    def _fill(self, index: int) -> Iterator[Answer]:
        """Read prompts into a free row until one of them needs more than its first token."""
        while self.rows[index] is None and self.has_more and not self.others_failed:
            try:
                prompt = self._next_prompt()
            except LlavaMcoreError:
                self.lockstep.agree(State.FAILED)
                raise
            if prompt is None:
                self.has_more = False
                return
            if not self._may_run():
                return
            batch, length, position, draw_index = prompt
            ids = self.model.prompt_ids(batch, length)
            ids = ids[:, ids[0] < self.model.models[-1].language_model.true_vocab_size]  # those that can be predicted
            draw_index = self.num_read if draw_index is None else draw_index
            draws = own_generator(self.settings.seed, draw_index) if self.settings.draws else None
            most_tokens = self.settings.longest_answer(length)
            processors = self.settings.processors(length, ids.device, num_left_out=length - ids.shape[1])
            row = _PromptRow(self.num_read, length, position, most_tokens, ids, processors, draws)
            self.num_read += 1
            logits = self.model.read_prompt(batch, length, index)
            self.rows[index] = row
            yield from self._take([index], self._chosen(logits, [row]))

    def _step(self) -> Iterator[Answer]:
        """Read the last token of every row and choose the next one."""
        indices = [index for index, row in enumerate(self.rows) if row is not None]
        logits = self._read_tokens()
        rows = [row for row in self.rows if row is not None]
        for row in rows:
            row.length, row.position = row.length + 1, row.position + 1
        yield from self._take(indices, self._chosen(None if logits is None else logits[indices], rows))

    def _read_tokens(self) -> Tensor | None:
        """Run the pass of the rows' last tokens, and of any token for a row that is free."""
        tokens = [0 if row is None else row.tokens[-1] for row in self.rows]
        positions = [0 if row is None else row.position for row in self.rows]
        lengths = [0 if row is None else row.length for row in self.rows]
        read, at = torch.tensor([tokens, positions], device=self.groups.device)
        return self.model.read_tokens(read, at, lengths)

    def _chosen(self, logits: Tensor | None, rows: Sequence[_PromptRow]) -> list[int]:
        """Return the next token of each of these rows, on all stages."""
        tokens = None
        if logits is not None:
            group = self.groups.tensor_parallel
            if any(row.processors or row.draws for row in rows):
                full_logits = whole_logits(logits, self.model.models[-1].language_model.true_vocab_size, group)
                each = zip(full_logits.split(1), rows, strict=True)
                choices = [processed_choice(x, row.ids, row.processors, row.draws) for x, row in each]
                tokens = torch.tensor(choices, device=logits.device)
            else:
                tokens = most_probable(logits, group)
        return self.model.from_last_stage(tokens, len(rows)).tolist()

    def _take(self, indices: Sequence[int], tokens: Sequence[int]) -> Iterator[Answer]:
        """Append tokens to their rows; rows that end with them are freed."""
        for index, token in zip(indices, tokens, strict=True):
            row = self.rows[index]
            assert row is not None
            row.tokens.append(token)
            if row.processors:
                row.ids = torch.cat([row.ids, row.ids.new_tensor([[token]])], dim=1)
            if token in self.settings.end_ids or len(row.tokens) == row.most_tokens:
                self.rows[index] = None
                yield Answer(row.index, row.tokens)

    def _next_prompt(self) -> tuple[MicroBatch, int, int, int | None] | None:
        """Return the next prompt on this rank's device, its length, next position and draw index; None after
        the last one."""
        prompt, problem = None, None
        if self.prompts is not None:
            try:
                prompt = next(self.prompts, None)
            except LlavaMcoreError as error:
                problem = str(error)
        about: list[Any] = [
            problem,
            None if prompt is None else (prompt.length, prompt.next_position, prompt.draw_index),
        ]
        groups = self.groups
        if groups.replica_size > 1:
            dist.broadcast_object_list(about, groups.replica_source, group=groups.control_replica)
        if about[0] is not None:
            raise DataError(about[0])
        if about[1] is None:
            return None
        (batch,) = share_step(groups, None if prompt is None else [prompt.batch], 1, self.fields)
        return self.model.padded(batch), *about[1]
