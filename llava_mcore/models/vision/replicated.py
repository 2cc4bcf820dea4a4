"""A tower that every rank of a stage has as a whole, because its tensor- and context-parallel ranks divide the images
instead.

Its configuration says tensor_model_parallel_size 1. Its layers are built in a process group of one rank, so that they
communicate with nobody; what is left to do is to tell the rest of the program that the ranks hold the same parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from llava_mcore.parallel.groups import (
    context_parallel_group,
    group_of_this_rank,
    tensor_and_context_parallel_group,
    tensor_parallel_group,
)
from llava_mcore.parallel.items import Items, MediaLengths, divide, gather_items, host_lengths

Fields = Mapping[str, Tensor]


class DividingTower(Protocol):
    """A tower that says what belongs to each of its images, frames or clips."""

    def items(self, media: Fields, lengths: MediaLengths) -> Items: ...


def run_divided(
    tower: DividingTower,
    run: Callable[[Fields, int], Tensor],
    blank: Callable[[Fields], tuple[Fields, int]],
    media: Fields,
    lengths: MediaLengths | None,
) -> Tensor:
    """Return a tower's output for all images of a micro-batch, of which this rank computes a part; a collective call.

    A rank without an image runs a blank one and keeps no row of it: gradients of all parameters are expected of it.

    Args:
        run: computes on fields, of which MEDIA_SEQLENS are not larger than the number.
        blank: returns the fields of a blank image, and that number.
        media: with one image at least.
        lengths: those of `media`; None reads them from the device.
    """
    group, context = tensor_and_context_parallel_group(), context_parallel_group()
    items = tower.items(media, host_lengths(media) if lengths is None else lengths)
    parts = divide(items.costs, group.size())
    local_items = parts[group.rank()]
    if local_items:
        local = run(items.of(media, local_items), items.longest(local_items))
    else:
        blank_output = run(*blank(media))
        local = blank_output[:0] + 0.0 * blank_output.sum()
    # Each context-parallel rank only has the gradients of the features at its own tokens.
    return gather_items(local, items.num_features, parts, group, context if context.size() > 1 else None)


def process_groups(config: TransformerConfig) -> ProcessGroupCollection:
    """Return the groups in which a tower's layers are built."""
    groups, alone = ProcessGroupCollection.use_mpu_process_groups(), group_of_this_rank()
    groups.cp = alone  # only the decoder's tokens are divided
    if config.tensor_model_parallel_size == 1:
        groups.tp = alone
    return groups


def mark_replicated(tower: nn.Module) -> None:
    """Note that ranks do not divide any parameter: megatron-core's layers always say that they do, and every rank
    would count its copy in the gradient norm."""
    for parameter in tower.parameters():
        vars(parameter).update(tensor_model_parallel=False, partition_dim=-1, partition_stride=1)


@torch.no_grad()
def copy_from_first_rank(tower: nn.Module) -> None:
    """Give all ranks the first one's initial weights, as each draws its own on a GPU; a collective call."""
    group = tensor_parallel_group()
    for tensor in (*tower.parameters(), *tower.buffers()):
        dist.broadcast(tensor, dist.get_process_group_ranks(group)[0], group=group)


def as_replicas(state: ShardedStateDict, prefix: str) -> ShardedStateDict:
    """Return a rank's sharded state with the tensors under a prefix as copies, of which the first rank's is saved.

    The layers themselves only know their group of one rank, and take every rank's tensors for the only ones.
    """
    rank = tensor_parallel_group().rank()
    return {key: _replica(x, rank) if key.startswith(prefix) else x for key, x in state.items()}


def _replica(sharded: Any, rank: int) -> Any:
    first, _, data_parallel = sharded.replica_id
    return replace(sharded, replica_id=(first, rank, data_parallel))
