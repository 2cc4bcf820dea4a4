"""One process of `check --logits`: a part of the parallel model."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)
from megatron.core.pipeline_parallel import get_forward_backward_func

from llava_mcore import log
from llava_mcore.config.rules.all_rules import check_parts
from llava_mcore.config.rules.context import check_divided_tokens
from llava_mcore.config.rules.dims import ModelDims
from llava_mcore.config.rules.experts import check_expert_layout
from llava_mcore.convert.load_model import load_part
from llava_mcore.errors import ConversionError, LlavaMcoreError, problems
from llava_mcore.media.batch_fields import NO_SCALE, PIXEL_SCALE
from llava_mcore.models.architectures.registry import architecture_of
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.models.probes import watch_ours
from llava_mcore.models.recorder import Recorder
from llava_mcore.parallel.batch import MicroBatch, longest_media, pad_to
from llava_mcore.parallel.context import DividedRow, cut
from llava_mcore.parallel.groups import Groups, context_parallel_group, initialize, shut_down
from llava_mcore.parallel.random import seed_everything
from llava_mcore.processes.local_world import enter
from llava_mcore.weights.names import HfNames


@dataclass(frozen=True)
class LogitsLayout:
    """Sizes of the parallel groups that compute the logits.

    `ep`: processes that divide the experts of a layer; replicas of the rest compute the same. `cp`: processes that
    divide the tokens.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1

    @property
    def num_processes(self) -> int:
        """Processes of the world."""
        return self.pp * math.lcm(self.tp * self.cp, self.ep)

    def __str__(self) -> str:
        context, experts = f" x cp {self.cp}" if self.cp > 1 else "", f" x ep {self.ep}" if self.ep > 1 else ""
        return f"tp {self.tp}{context} x pp {self.pp}{experts}"

    def require(self, dims: ModelDims, hf_dir: Path) -> None:
        """Raise ConversionError if the processes cannot divide every layer."""
        source = str(hf_dir)
        refused = check_parts(dims, self.tp, self.pp, source)  # of whole towers every rank has other outputs
        refused += [
            *check_expert_layout(dims, self.ep, 1, source),
            *check_divided_tokens(dims, self.tp, self.cp, source),
        ]
        if refused:
            raise ConversionError(problems(f"logits cannot be compared at {self}", refused))


def run_rank(rank: int, num_processes: int, port: int, job: Path) -> None:
    """Compute one rank's part of the logits for job.pt and write it to the folder; exit code 2 after a message.

    Args:
        port: port of a store on this machine, through which the processes find each other.
    """
    enter(rank, num_processes, port)
    log.set_up(rank)
    with torch.serialization.safe_globals([HfNames, LogitsLayout]):
        job_options = torch.load(job / "job.pt", weights_only=True)
    sizes: LogitsLayout = job_options["layout"]
    groups = initialize(
        backend="gloo",
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
    )
    seed_everything(0)
    try:
        base_dir = None if job_options["base_dir"] is None else Path(job_options["base_dir"])
        model = load_part(groups, Path(job_options["checkpoint"]), base_dir=base_dir)
    except LlavaMcoreError as error:
        if rank == 0 or not error.on_all_ranks:
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    # The outputs of all modules and the logits, gathered from tensor- and context-parallel ranks.
    names, inputs = job_options["names"], job_options["inputs"]
    recorder = Recorder(_whole_tokens(names, inputs["input_ids"].shape[1]) if groups.cp_size > 1 else None)
    watch_ours(recorder, model, names, lambda x: _gather(groups, x))
    result: dict[str, Any] = {"logits": forward(model, inputs), "modules": recorder.outputs}
    # Replicas that share experts have the same outputs.
    if groups.tp_rank == 0 and groups.cp_rank == 0 and groups.dp_rank == 0:
        torch.save(result, job / f"stage{groups.pp_rank}.pt")
    shut_down()


def _gather(groups: Groups, x: Tensor) -> Tensor:
    """Concatenate the features [..., f / tp] of the tensor-parallel ranks."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(groups.tp_size)]
    dist.all_gather(parts, x.contiguous(), group=groups.tensor_parallel)
    return torch.cat(parts, dim=-1)


def _whole_tokens(names: HfNames, length: int) -> Callable[[str, Tensor], Tensor]:
    """Return a function that gathers the language model's outputs from context-parallel ranks, in the order of `length`
    tokens."""
    group = context_parallel_group()
    multiple = 2 * group.size()
    num_local = -(-length // multiple) * multiple // group.size()

    def gather(name: str, x: Tensor) -> Tensor:
        if not name.startswith(names.text):
            return x
        of_tokens = x[0].unflatten(0, (num_local, -1))  # of some modules a token has several rows
        row = DividedRow.of(num_local, None, x.device, group)
        return row.gather(of_tokens)[:length].flatten(0, 1)[None]

    return gather


_TOKENS = ("input_ids", "position_ids")
"""The inputs of a forward pass that are not media."""


def given_media(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the media of a forward pass, of pixels that are normalized already."""
    return {PIXEL_SCALE: NO_SCALE} | {name: x for name, x in inputs.items() if name not in _TOKENS}


def forward(model: VisionLanguageModel, inputs: dict[str, Tensor]) -> Tensor | None:
    """Run one micro-batch through the pipeline; the last stage returns logits [b, s, vocabulary].

    Args:
        inputs: input_ids [b, s], position_ids (without them, tokens are counted from 0) and the media. On the CPU with
            context parallelism, whose ranks take their part of the tokens.
    """
    # One micro-batch; what the last stage returns is kept.
    ids, media = inputs["input_ids"], given_media(inputs)
    length, cp_size = ids.shape[1], model.config.context_parallel_size
    positions = inputs.get("position_ids", torch.arange(length, device=ids.device).expand(ids.shape))
    if cp_size > 1:
        ids, positions, media = _own_part(model, ids, positions, media)
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
            seq_length=ids.shape[1] * cp_size,
            micro_batch_size=ids.shape[0],
            forward_only=True,
        )
    if not model.post_process:
        return None
    if cp_size == 1:
        return out[0]
    row = DividedRow.of(ids.shape[1], None, ids.device, context_parallel_group())
    return row.gather(out[0].transpose(0, 1))[:length].transpose(0, 1)


def _own_part(
    model: VisionLanguageModel, ids: Tensor, positions: Tensor, media: dict[str, Tensor]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return this context-parallel rank's part of ids, positions and media."""
    group, fields = context_parallel_group(), architecture_of(model.hf).fields
    multiple = 2 * group.size()
    no_bounds = torch.empty(0, dtype=torch.int32)
    media = {name: x for name, x in media.items() if name in fields}
    batch = MicroBatch(ids, ids, torch.zeros(ids.shape), positions, media, no_bounds)
    padded = pad_to(batch, -(-ids.shape[1] // multiple) * multiple, fields)
    part = cut(padded, group.size(), fields)[group.rank()]
    return part.input_ids, part.position_ids, part.media
