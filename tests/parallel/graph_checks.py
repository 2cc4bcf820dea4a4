"""What the ranks of the tests of graphs on CPUs run."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from llava_mcore.parallel.groups import Groups
from llava_mcore.training.fetch import SkipBudget, fetch_step
from llava_mcore.training.graphs import model_graphs
from llava_mcore.training.graphs.layer_graphs import LayerGraphs
from llava_mcore.training.graphs.packs import TokenPacks
from llava_mcore.training.setup import Trainer
from llava_mcore.training.step import train_step
from tests.helpers.batches import LENGTH, FakeBatch, FullPackLoader
from tests.helpers.emulated_graphs import EmulatedGraph, emulated_graphs
from tests.parallel.checks import join
from tests.parallel.training_checks import GLOBAL_BATCH, MIXED, make_trainer, run_config

STEPS = 5
KINDS: dict[str, dict[str, Any]] = {
    "all trained": {},
    "distributed": {"parallel.use_distributed_optimizer": True},
    "tower frozen": {"model.freeze_vision_model": True, "parallel.use_distributed_optimizer": True},
    "adapters": {"adapter.r": 4, "adapter.projection_r": 4, "model.freeze_vision_model": True},
}
Curve = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


class OneRankFirstLoader(FullPackLoader):
    """Packs whose shapes come up on one data-parallel rank first: a third sample on the last rank in steps 2 and 3,
    then on the first rank too."""

    def __next__(self) -> FakeBatch:
        step = self.count * self.size * self.dp // GLOBAL_BATCH
        has_three = step in (1, 2) if self.rank == self.dp - 1 else step == 3
        batch = super().__next__()
        bounds = list(range(0, LENGTH * self.size + 1, LENGTH))
        if has_three:
            bounds.insert(-1, bounds[-2] + LENGTH // 2)
        batch.cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
        return batch


def curves(
    tp: int, checkpoint: str, save_dir: str, ep: int = 1, kinds: Collection[str] = tuple(KINDS), cp: int = 1
) -> dict[str, dict[str, Any]]:
    """Train without and with emulated graphs; return by kind what the tests compare."""
    groups, results = join(tp, 1, ep, cp=cp), {}
    model_graphs.LAYERS_PER_GRAPH = 2  # more than one graph in a model of four layers
    for kind in kinds:
        flags = KINDS[kind] | {"parallel.expert_model_parallel_size": ep, "parallel.context_parallel_size": cp}
        flags |= {"router.aux_loss_coef": 0.1} if ep > 1 else {}
        sizes = {"training.micro_batch_size": 2, "data.packing": True, "parallel.sequence_parallel": tp > 1}
        run = run_config(tp, 1, checkpoint, save_dir, **flags | sizes)
        result = results[kind] = {}
        for name, with_graphs in (("without", False), ("with", True)):
            calls = EmulatedGraph.calls
            with emulated_graphs(), reduced_buckets() as reduced:
                trainer = make_trainer(groups, run)
                result[name] = train(groups, trainer, with_graphs=with_graphs)
            result[f"calls {name}"] = EmulatedGraph.calls - calls
            names = {id(p): name for name, p in trainer.models[0].named_parameters()}
            result[f"reduced {name}"] = [names[x] for x in reduced]
        result["replicas agree"] = replicas_agree(groups, trainer)
    return results


def train(groups: Groups, trainer: Trainer, *, with_graphs: bool) -> Curve:
    """Train some steps."""
    model, [chunk] = trainer.models[0].language_model, trainer.chunks
    graphs, loader = [], None
    if with_graphs:
        segments = model_graphs.decoder_segments(model)
        graphs.append(LayerGraphs(segments, model.config, chunk, TokenPacks(LENGTH)))
    if groups.loads_data:
        ranks = {"dp_rank": groups.dp_rank, "dp_size": groups.dp_size}
        loader = OneRankFirstLoader(trainer.hf, micro_batch_size=2, text_only=MIXED, **ranks)
    curve = []
    parts = groups, trainer.chunks, trainer.optimizer, trainer.scheduler
    for _ in range(STEPS):
        batches, *_ = fetch_step(groups, loader, GLOBAL_BATCH // (2 * groups.dp_size), SkipBudget(0.0), trainer.fields)
        result = train_step(*parts, batches, GLOBAL_BATCH, graphs).result()
        curve.append((result.loss, result.grad_norm))
    return curve


@contextmanager
def reduced_buckets() -> Iterator[list[int]]:
    """Record the id of the first parameter of every bucket whose gradients begin to be reduced, in order."""
    reduced: list[int] = []
    original = _ParamAndGradBucketGroup.start_grad_sync

    def start_grad_sync(group: Any, *arguments: Any, **named: Any) -> None:
        if group.grad_reduce_handle is None:
            reduced.append(id(group.buckets[0].params_list[0]))
        original(group, *arguments, **named)

    with mock.patch.object(_ParamAndGradBucketGroup, "start_grad_sync", start_grad_sync):
        yield reduced


def replicas_agree(groups: Groups, trainer: Trainer) -> bool:
    """Return whether all data-parallel ranks have the same weights, bit for bit, except experts of their own; a
    collective call."""
    if trainer.run.parallel.use_distributed_optimizer:  # weights are gathered in the next forward pass
        for chunk in trainer.chunks:
            chunk.start_param_sync(force_sync=True)
    replicated = [p for p in trainer.models[0].parameters() if vars(p).get("allreduce", True)]
    weights = torch.cat([p.detach().flatten() for p in replicated])
    all_weights = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(all_weights, weights)
    return all(torch.equal(x, weights) for x in all_weights[groups.tp_rank :: groups.tp_size])
