"""One process of `check --logits`: a part of the parallel model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)
from megatron.core.pipeline_parallel import get_forward_backward_func

from llava_mcore import log
from llava_mcore.convert.load_model import load_part
from llava_mcore.errors import LlavaMcoreError
from llava_mcore.media.batch_fields import NO_SCALE, PIXEL_SCALE
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.models.probes import Recorder, watch_ours
from llava_mcore.parallel.batch import longest_media
from llava_mcore.parallel.groups import Groups, initialize, shut_down
from llava_mcore.parallel.random import seed_everything
from llava_mcore.processes.local_world import enter
from llava_mcore.weights.names import HfNames


def run_rank(rank: int, num_processes: int, port: int, job: Path) -> None:
    """Compute one rank's part of the logits for job.pt and write it to the folder; exit code 2 after a message.

    Args:
        port: port of a store on this machine, through which the processes find each other.
    """
    enter(rank, num_processes, port)
    log.set_up(rank)
    with torch.serialization.safe_globals([HfNames]):
        job_options = torch.load(job / "job.pt", weights_only=True)
    groups = initialize(
        backend="gloo",
        tensor_model_parallel_size=job_options["tp"],
        pipeline_model_parallel_size=job_options["pp"],
        expert_model_parallel_size=job_options["ep"],
    )
    seed_everything(0)
    try:
        base_dir = None if job_options["base_dir"] is None else Path(job_options["base_dir"])
        model = load_part(groups, Path(job_options["checkpoint"]), base_dir=base_dir)
    except LlavaMcoreError as error:
        if rank == 0 or not error.on_all_ranks:
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    # The outputs of all modules and the logits, gathered from tensor-parallel ranks.
    recorder = Recorder()
    watch_ours(recorder, model, job_options["names"], lambda x: _gather(groups, x))
    result: dict[str, Any] = {"logits": forward(model, job_options["inputs"]), "modules": recorder.outputs}
    if groups.tp_rank == 0 and groups.dp_rank == 0:  # replicas, between which experts are divided, have the same
        torch.save(result, job / f"stage{groups.pp_rank}.pt")
    shut_down()


def _gather(groups: Groups, x: Tensor) -> Tensor:
    """Concatenate the features [..., f / tp] of the tensor-parallel ranks."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(groups.tp_size)]
    dist.all_gather(parts, x.contiguous(), group=groups.tensor_parallel)
    return torch.cat(parts, dim=-1)


_TOKENS = ("input_ids", "position_ids")
"""The inputs of a forward pass that are not media."""


def given_media(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the media of a forward pass, of pixels that are normalized already."""
    return {PIXEL_SCALE: NO_SCALE} | {name: x for name, x in inputs.items() if name not in _TOKENS}


def forward(model: VisionLanguageModel, inputs: dict[str, Tensor]) -> Tensor | None:
    """Run one micro-batch through the pipeline; the last stage returns logits [b, s, vocabulary].

    Args:
        inputs: input_ids [b, s], position_ids (without them, tokens are counted from 0) and the media.
    """
    # One micro-batch; what the last stage returns is kept.
    ids, media = inputs["input_ids"], given_media(inputs)
    positions = inputs.get("position_ids", torch.arange(ids.shape[1], device=ids.device).expand(ids.shape))
    out: list[Tensor] = []

    def step(batch: Any, stage: VisionLanguageModel) -> Any:
        y = stage(ids, positions, media, max_media_seqlen=longest_media(media))

        def collect(x: Tensor, non_loss_data: bool = False) -> Any:
            out.append(x.detach())
            return x.sum(), torch.tensor(1, device=x.device), {}

        return y, collect

    # megatron-core's schedule passes activations between the stages.
    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter([None]),
            model=[model],
            num_microbatches=1,
            seq_length=ids.shape[1],
            micro_batch_size=ids.shape[0],
            forward_only=True,
        )
    return out[0] if model.post_process else None
