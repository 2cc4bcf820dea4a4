"""The arguments of `generate` after they were checked: a model, prompts and settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from llava_mcore.config.sections.data import LIMITS, Handling, Limits, PixelRange
from llava_mcore.data.encode.assets import Assets, load_assets
from llava_mcore.data.samples import Conversation, Skip
from llava_mcore.inference.generation.questions import Question, Questions
from llava_mcore.inference.generation.settings import TokenSampling

Dtype = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class Layout:
    """How a Megatron checkpoint is divided; `cp` ranks divide the tokens of prompts.

    `num_rows`: prompts that a replica answers at the same time. `replicas`: copies of the model, which share the
    questions of a dataset.
    """

    tp: int
    pp: int
    num_rows: int
    cp: int = 1
    replicas: int = 1

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.tp * self.cp * self.pp * self.replicas

    def __str__(self) -> str:
        copies = f" x {self.replicas} replicas" if self.replicas > 1 else ""
        return f"tp {self.tp}{f' x cp {self.cp}' if self.cp > 1 else ''} x pp {self.pp}{copies}"


@dataclass(frozen=True)
class StoredModel:
    """A Megatron checkpoint: the folder of one iteration. `base_dir`: see `load_part`."""

    checkpoint: Path
    base_dir: Path | None = None


@dataclass(frozen=True)
class ReadOptions:
    """How conversations are read.

    `chat_template`: instead of the folder's. `pixels`: range of the areas of resized images, as of `load_assets`.
    """

    chat_template: str | None = None
    special_tokens_in_text: Handling = "text"
    limits: Limits = LIMITS
    pixels: PixelRange = field(default_factory=PixelRange)

    def assets(self, hf_dir: Path) -> Assets:
        """Load a folder's tokenizer, template and processors. DataError lists what is missing."""
        return load_assets(
            hf_dir,
            chat_template=self.chat_template,
            special_tokens_in_text=self.special_tokens_in_text,
            limits=self.limits,
            pixels=self.pixels,
        )


@dataclass(frozen=True)
class DataJob:
    """Questions of a prepared dataset; the fields are those of `Questions`."""

    path: Path | str
    split: str
    most_samples: int | None = None
    every_answer: bool = False


@dataclass(frozen=True)
class SampleShare:
    """The part of a dataset's samples that a replica reads: every `replicas`-th, from index `replica` on."""

    replica: int = 0
    replicas: int = 1


@dataclass(frozen=True)
class Asked:
    """The questions of a replica, each with the index of its sample. `total`: how many, if that is known."""

    total: int | None
    questions: Iterator[tuple[int, Question | Skip]]


@dataclass(frozen=True)
class Job:
    """`asked`: one conversation that ends with a question, or a dataset.

    `partial`: file that gets the answers to a dataset's questions as they come.
    """

    asked: Conversation | DataJob
    reading: ReadOptions
    sampling: TokenSampling
    max_new_tokens: int
    dtype: Dtype | None = None
    partial: Path | None = None

    def questions(self, assets: Assets, share: SampleShare = SampleShare()) -> Asked:
        """Open the questions of a replica. DataError if the data cannot be opened."""
        if isinstance(self.asked, Conversation):
            return Asked(1, iter([(0, Question((0, 0, 0), "question", self.asked, ""))]))
        data = Questions(
            self.asked.path,
            assets,
            split=self.asked.split,
            most_samples=self.asked.most_samples,
            every_answer=self.asked.every_answer,
        )
        samples = range(share.replica, len(data.indices), share.replicas)
        questions = ((sample, x) for sample in samples for x in data.read([data.indices[sample]]))
        return Asked(None if self.asked.every_answer else len(samples), questions)
