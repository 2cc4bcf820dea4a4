"""One process of `generate --megatron-dir`: a part of the parallel model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
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
from llava_mcore.inference.answering.answer_file import written_to
from llava_mcore.inference.answering.job import Job, Layout, StoredModel
from llava_mcore.inference.answering.progress import shown_progress
from llava_mcore.inference.generation.generate import generate
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

ANSWERS, PROBLEM = "answers.jsonl", "problem.txt"


def run_rank(
    rank: int,
    num_processes: int,
    port: int,
    model: StoredModel,
    job: Job,
    layout: Layout,
    results: Path,
) -> None:
    """Answer as one rank; the first one writes ANSWERS, or PROBLEM.

    Args:
        port: see `enter`.
        results: folder for the files.

    Raises:
        LlavaMcoreError: on all ranks, the text of PROBLEM.
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
    # An error reaches the command as text, which rank 0 writes down.
    try:
        records = _answer(groups, model, job, layout.num_rows)
    except LlavaMcoreError as error:
        if rank == 0:
            (results / PROBLEM).write_text(str(error), encoding="utf-8")
        shut_down()
        raise
    # One rank has the answers.
    if groups.loads_data:
        lines = [json.dumps(asdict(record), ensure_ascii=False) for record in records]
        (results / ANSWERS).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    shut_down()


def _answer(groups: Groups, stored: StoredModel, job: Job, num_rows: int) -> list[Record]:
    """Return the records on the rank that loads data, and an empty list on the others. A collective call."""
    opened = raise_together(groups, lambda: _open(groups, stored.checkpoint, job))
    model = raise_together(groups, lambda: _load(groups, stored, job))
    ids = gather_to_all(groups, None if opened is None else opened[0].eos_token_id)
    eos = [eos_id for eos_id in ids if eos_id is not None]
    settings = raise_together(groups, lambda: _settings(stored.checkpoint, model, job, eos[0] if eos else None))
    fields = architecture_of(model.hf).fields
    if opened is None:
        for _ in generate([model], groups, None, settings, fields, num_rows=num_rows, graphs=True):
            pass
        return []
    assets, total, questions = opened
    asked = PromptQueue(questions, assets, settings)
    with shown_progress(total) as show, written_to(job.partial) as write:
        answers = generate([model], groups, asked.prompts(), settings, fields, num_rows=num_rows, graphs=True)
        for done, answer in enumerate(answers, 1):
            asked.answered(answer.index, answer.tokens)
            show(done)
            write(asked.records)
        write(asked.records)  # those after the last answer, which cannot be asked
    return asked.records


def _open(groups: Groups, checkpoint: Path, job: Job) -> tuple[Assets, int | None, Iterator[Question | Skip]] | None:
    if not groups.loads_data:
        return None
    assets = job.reading.assets(hf_folder(checkpoint))
    return assets, *job.questions(assets)


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
