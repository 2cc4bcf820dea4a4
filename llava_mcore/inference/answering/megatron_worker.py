"""One process of `generate --megatron-dir`: a part of the parallel model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any

import torch

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from llava_mcore import log
from llava_mcore.checkpoint.layout import hf_folder
from llava_mcore.config.rules.all_rules import tower_divides
from llava_mcore.convert.jobs import DTYPES
from llava_mcore.convert.load_model import load_part
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.samples import Skip
from llava_mcore.errors import LlavaMcoreError
from llava_mcore.inference.answering.answer_file import of_replica, written_to
from llava_mcore.inference.answering.job import Asked, Job, Layout, SampleShare, StoredModel
from llava_mcore.inference.answering.progress import shown_progress
from llava_mcore.inference.generation.generate import generate
from llava_mcore.inference.generation.prompt import Prompt
from llava_mcore.inference.generation.questions import Question
from llava_mcore.inference.generation.records import PromptQueue, Record
from llava_mcore.inference.generation.settings import Settings, read_settings, require_known
from llava_mcore.models.architectures.hf_config import load_hf_config, model_dims
from llava_mcore.models.architectures.registry import architecture_of
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.parallel.groups import Groups, gather_to_all, initialize, shut_down
from llava_mcore.parallel.random import seed_everything
from llava_mcore.parallel.together import raise_together
from llava_mcore.processes.local_world import enter

IndexedRecord = tuple[int, Record]
"""The index of a sample among those that are asked, and a record of it."""

_APART = 100_003
"""Distance between the draw indices of a sample's questions."""


def answers_file(results: Path, replica: int) -> Path:
    """Return the file with the indexed records of a replica."""
    return results / f"answers-{replica}.jsonl"


def problem_file(results: Path, replica: int) -> Path:
    """Return the file that says what went wrong in a replica, if anything did."""
    return results / f"problem-{replica}.txt"


def partial_file(partial: Path, share: SampleShare) -> Path:
    """Return the file that gets a replica's records as they come. `partial`: that of the whole command."""
    return partial if share.replicas == 1 else of_replica(partial, share.replica)


def run_rank(
    rank: int,
    num_processes: int,
    port: int,
    model: StoredModel,
    job: Job,
    layout: Layout,
    results: Path,
) -> None:
    """Answer as one rank; the first one of each replica writes its answers, or its problem.

    Args:
        port: see `enter`.
        results: folder for the files.

    Raises:
        LlavaMcoreError: on all ranks of a replica, the text of its problem.
    """
    # Join the world of this command.
    enter(rank, num_processes, port)
    log.quiet_libraries()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    groups = initialize(
        backend=backend,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
    )
    seed_everything(0)
    # An error reaches the command as text, which a rank writes down.
    share = SampleShare(groups.dp_rank, groups.dp_size)
    try:
        records = _answer(groups, model, job, share, layout.num_rows)
    except LlavaMcoreError as error:
        if groups.loads_data:
            problem_file(results, share.replica).write_text(str(error), encoding="utf-8")
        shut_down()
        raise
    # One rank of a replica has its answers.
    if groups.loads_data:
        lines = [json.dumps([index, asdict(record)], ensure_ascii=False) for index, record in records]
        answers_file(results, share.replica).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    shut_down()


def _answer(groups: Groups, stored: StoredModel, job: Job, share: SampleShare, num_rows: int) -> list[IndexedRecord]:
    """Return the records on the replica's rank that loads data, and an empty list on the others. A collective call."""
    opened = raise_together(groups, lambda: _open(groups, stored.checkpoint, job, share))
    model = raise_together(groups, lambda: _load(groups, stored, job))
    ids = gather_to_all(groups, None if opened is None else opened[0].eos_token_id)
    eos = [eos_id for eos_id in ids if eos_id is not None]
    settings = raise_together(groups, lambda: _settings(stored.checkpoint, model, job, eos[0] if eos else None))
    fields = architecture_of(model.hf).fields
    if opened is None:
        for _ in generate([model], groups, None, settings, fields, num_rows=num_rows, graphs=True):
            pass
        return []
    assets, asked = opened
    indices: list[int] = []  # of the sample of each record
    queue = PromptQueue(_questions(asked, indices), assets, settings)
    out = None if job.partial is None else partial_file(job.partial, share)
    with shown_progress(asked.total if share.replica == 0 else 1) as show, written_to(out) as write:
        prompts = _with_draws(queue, indices)
        answers = generate([model], groups, prompts, settings, fields, num_rows=num_rows, graphs=True)
        for done, answer in enumerate(answers, 1):
            queue.answered(answer.index, answer.tokens)
            show(done)
            write(queue.records)
        write(queue.records)  # those after the last answer, which cannot be asked
    return list(zip(indices, queue.records, strict=True))


def _questions(asked: Asked, indices: list[int]) -> Iterator[Question | Skip]:
    """Yield what is asked, and append the index of the sample of each."""
    for index, question in asked.questions:
        indices.append(index)
        yield question


def _with_draws(queue: PromptQueue, indices: list[int]) -> Iterator[Prompt]:
    """Yield the prompts, each with what chooses its random numbers: the same for any number of replicas.

    Args:
        indices: of the samples of the questions so far.
    """
    for prompt in queue.prompts():
        sample = indices[-1]
        earlier = sum(1 for _ in takewhile(partial(eq, sample), reversed(indices))) - 1
        yield replace(prompt, draw_index=sample + earlier * _APART)


def _open(groups: Groups, checkpoint: Path, job: Job, share: SampleShare) -> tuple[Assets, Asked] | None:
    if not groups.loads_data:
        return None
    assets = job.reading.assets(hf_folder(checkpoint))
    return assets, job.questions(assets, share)


def _load(groups: Groups, stored: StoredModel, job: Job) -> VisionLanguageModel:
    hf = load_hf_config(hf_folder(stored.checkpoint))
    folder_dtype: Any = hf.dtype
    dtype = DTYPES[job.dtype] if job.dtype is not None else folder_dtype or torch.float32
    divides_images = groups.tp_size == 1 and groups.cp_size > 1
    replicates_tower = divides_images or not tower_divides(model_dims(hf), groups.tp_size)
    on_cpu = groups.device.type == "cpu"
    model = load_part(
        groups,
        stored.checkpoint,
        dtype=dtype,
        on_cpu=on_cpu,
        vision_data_parallel=replicates_tower,
        base_dir=stored.base_dir,
    )
    return model.to(device=groups.device, dtype=dtype)  # megatron-core creates norms in fp32


def _settings(checkpoint: Path, model: VisionLanguageModel, job: Job, tokenizer_eos: int | None) -> Settings:
    folder = hf_folder(checkpoint)
    settings = read_settings(folder, model.hf, tokenizer_eos, max_new_tokens=job.max_new_tokens, sampling=job.sampling)
    require_known(settings, folder)
    return settings.within(model.window)
