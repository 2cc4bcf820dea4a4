"""Answers of a Hugging Face folder, one question after another, by transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from llava_mcore.data.samples import Skip
from llava_mcore.errors import DataError
from llava_mcore.inference.answering.answer_file import written_to
from llava_mcore.inference.answering.hf_model import HfModel, Quantization
from llava_mcore.inference.answering.job import Job
from llava_mcore.inference.answering.progress import shown_progress
from llava_mcore.inference.generation.prompt import decoded
from llava_mcore.inference.generation.questions import Question
from llava_mcore.inference.generation.records import Record
from llava_mcore.inference.generation.settings import Settings, read_settings


def answer_folder(hf_dir: Path, job: Job, *, quantization: Quantization | None = None) -> list[Record]:
    """Return a record of every question, in the order of the data.

    Raises:
        LlavaMcoreError: the folder cannot be used, or the data cannot be read.
    """
    model = HfModel.load(hf_dir, job.reading, dtype=job.dtype, quantization=quantization)
    settings = read_settings(
        hf_dir,
        model.model.config,
        model.assets.eos_token_id,
        max_new_tokens=job.max_new_tokens,
        sampling=job.sampling,
    )
    asked = job.questions(model.assets)
    records: list[Record] = []
    torch.manual_seed(job.sampling.seed)
    with shown_progress(asked.total) as show, written_to(job.partial) as write:
        for _, question in asked.questions:
            records.append(_record(question, model, settings))
            show(len(records))
            write(records)
    return records


def _record(question: Question | Skip, model: HfModel, settings: Settings) -> Record:
    """Ask one question."""
    if isinstance(question, Skip):
        return Record(question.where, "", None, problem=question.reason)
    record = Record(question.key, question.text, question.reference, position=question.position)
    try:
        tokens = model.answer(question.conversation, settings)
    except DataError as error:
        return replace(record, problem=str(error))
    return replace(record, answer=decoded(model.assets, tokens), num_tokens=len(tokens))
