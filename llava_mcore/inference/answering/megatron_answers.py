"""Answers of a Megatron checkpoint, by tp x cp x pp processes for each replica: on GPUs, or over gloo without."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from llava_mcore.adapters.adapter_record import check_base_dir, holds_adapters, read_base
from llava_mcore.checkpoint.layout import hf_folder, newest_iteration
from llava_mcore.checkpoint.verify import require_undamaged
from llava_mcore.config.rules.all_rules import check_parts
from llava_mcore.config.rules.context import check_divided_tokens
from llava_mcore.errors import CheckpointError, ConfigError, LlavaMcoreError, problems
from llava_mcore.inference.answering.answer_file import written_to
from llava_mcore.inference.answering.job import Job, Layout, StoredModel
from llava_mcore.inference.answering.megatron_worker import answers_file, problem_file, run_rank
from llava_mcore.inference.generation.records import Record
from llava_mcore.models.architectures.hf_config import load_hf_config, model_dims
from llava_mcore.processes.local_world import run_here, run_world


def answer_checkpoint(folder: Path, job: Job, layout: Layout, base_dir: Path | None = None) -> list[Record]:
    """Return a record of every question, in the order of the data.

    Args:
        folder: folder of checkpoints, of which the newest is used, or of one iteration.
        base_dir: for an adapter: see `load_part`.

    Raises:
        LlavaMcoreError: the checkpoint cannot be used at this layout, or the data cannot be read.
    """
    # Damaged weights would give wrong answers without an error.
    checkpoint = usable_checkpoint(folder, layout, base_dir)
    require_undamaged(checkpoint)
    if holds_adapters(checkpoint):
        require_undamaged(read_base(checkpoint).found_at(base_dir))
    # One rank runs in this process, several in processes of their own. Files carry their results.
    size, on_gpus = layout.size, torch.cuda.device_count() > 0
    with tempfile.TemporaryDirectory(prefix="llava_mcore-") as name:
        results = Path(name)
        arguments = (StoredModel(checkpoint, base_dir), job, layout, results)
        try:
            if size == 1:
                run_here(run_rank, *arguments)
            else:
                run_world(run_rank, size, *arguments, on_gpus=on_gpus)
        except CheckpointError as error:
            files = [problem_file(results, replica) for replica in range(layout.replicas)]
            file = next((file for file in files if file.is_file()), None)
            if size > 1 and file is not None:
                raise LlavaMcoreError(file.read_text(encoding="utf-8")) from error
            raise
        records = _merged(results, layout.replicas)
    if job.partial is not None and layout.replicas > 1:
        with written_to(job.partial) as write:
            write(records)
    return records


def _merged(results: Path, replicas: int) -> list[Record]:
    """Return the records of all replicas, in the order of the data."""
    texts = [answers_file(results, replica).read_text(encoding="utf-8") for replica in range(replicas)]
    lines = [line for text in texts for line in text.split("\n") if line]  # answers may have other line separators
    indexed = sorted((json.loads(line) for line in lines), key=lambda pair: int(pair[0]))
    return [Record(**values) for _, values in indexed]


def usable_checkpoint(folder: Path, layout: Layout, base_dir: Path | None) -> Path:
    """Return the folder of the iteration that is used, before anything is loaded. Errors like `answer_checkpoint`."""
    checkpoint = newest_iteration(folder)
    check_base_dir(checkpoint, base_dir)
    dims = model_dims(load_hf_config(hf_folder(checkpoint)))
    wrong = check_parts(dims, layout.tp, layout.pp, str(checkpoint), vision_data_parallel=True)
    wrong += check_divided_tokens(dims, layout.tp, layout.cp, str(checkpoint))
    if wrong:
        raise ConfigError(problems(f"{checkpoint} cannot be split into {layout}", wrong))
    size, num_gpus = layout.size, torch.cuda.device_count()
    if 0 < num_gpus < size:
        raise ConfigError(
            f"{layout} needs {size} GPUs, and {num_gpus} can be seen; choose a smaller "
            "layout, or set CUDA_VISIBLE_DEVICES= to compute on the CPU"
        )
    return checkpoint
