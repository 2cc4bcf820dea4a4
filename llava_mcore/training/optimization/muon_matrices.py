"""The parameters that Muon updates, and the parts of them that each rank has."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor
from torch.nn import Parameter
from transformers import PretrainedConfig

from llava_mcore.compat.megatron.optimizer import updated_parameters
from llava_mcore.models.language.families.registry import embedding_rows
from llava_mcore.models.model_table import mapping_table, usual_names
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.models.trainable import whole_names
from llava_mcore.parallel.groups import expert_tensor_parallel_group, tensor_parallel_group
from llava_mcore.weights.layouts import TensorTransform
from llava_mcore.weights.matrices import is_matrix, matrices_in
from llava_mcore.weights.table import Shard


@dataclass(frozen=True)
class Matrix:
    """A parameter of the model that Muon updates.

    split: how tensor-parallel ranks divide it; None: each has all of it. layout: takes it apart into the matrices that
    are orthogonalized. shape: of a rank's part. of_experts: expert-tensor-parallel ranks divide it.
    """

    name: str
    parameter: Parameter
    split: Shard | None
    layout: TensorTransform

    @property
    def shape(self) -> torch.Size:
        return self.parameter.shape

    @property
    def of_experts(self) -> bool:
        return bool(vars(self.parameter).get("of_experts", False))

    @property
    def cost(self) -> int:
        """Multiplications of an iteration, roughly."""
        *_, rows, columns = self.shape
        return self.shape.numel() * min(rows, columns)

    def orthogonalized(self, parts: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Return the parts of all tensor-parallel ranks after a function of the matrices.

        Args:
            parts: of all ranks, or one that every rank has.
        """
        joined = parts[0] if self.split is None else self.split.join(parts)
        joined = self.layout.to_megatron(*(function(x) for x in self.layout.to_hf(joined)))
        return [joined] if self.split is None else self.split.split(joined, len(parts))


def find_matrices(
    models: Sequence[VisionLanguageModel], hf: PretrainedConfig, *, whole_towers: bool
) -> dict[int, Matrix]:
    """Return the trained matrices of linear layers on this rank, by the identity of their parameters.

    Args:
        whole_towers: every tensor-parallel rank has the whole tower.
    """
    entries = mapping_table(hf, usual_names(hf), hf_tensors={}, padded_vocab_size=embedding_rows(hf)).entries
    matrices = {}
    for model in models:
        for name, parameter in whole_names(model).items():
            entry = entries[name]
            if not parameter.requires_grad or not is_matrix(entry):
                continue
            is_whole = entry.shard.dim is None or (whole_towers and name.startswith("vision_model."))
            split = None if is_whole else entry.shard
            matrices[id(parameter)] = Matrix(name, parameter, split, matrices_in(entry))
    return matrices


@dataclass(frozen=True)
class HeldMatrix:
    """A matrix and the parts of it on the ranks of an optimizer.

    held: this rank's part as the optimizer has it, flat or not; None if it has none. sizes: number of elements on each
    of the ranks that shard the optimizer, in order: their parts are consecutive.
    """

    matrix: Matrix
    held: Parameter | None
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Holders:
    """The matrices of an optimizer and the ranks that have parts of them.

    divided: the ranks among which tensor parallelism divides the matrices. sharded: the ranks that shard the optimizer;
    None: it is whole on every rank.
    """

    matrices: tuple[HeldMatrix, ...]
    divided: dist.ProcessGroup
    sharded: dist.ProcessGroup | None

    @property
    def num_slots(self) -> int:
        """Matrices that are computed at once, each on a rank of its own."""
        return self.divided.size() * (1 if self.sharded is None else self.sharded.size())

    def rounds(self) -> list[list[HeldMatrix]]:
        """Return the matrices in rounds that are computed one after the other; those of a round cost about the same."""
        costly_first = sorted(self.matrices, key=lambda x: (-x.matrix.cost, x.matrix.name))
        return [costly_first[i : i + self.num_slots] for i in range(0, len(costly_first), self.num_slots)]


def find_holders(optimizer: MegatronOptimizer, matrices: Mapping[int, Matrix]) -> Holders:
    """Find the matrices of an optimizer and their parts; a collective call of the ranks that shard it."""
    ranges = {
        id(parameter): (held, start, stop)
        for parameter, held, start, stop in updated_parameters(optimizer)
        if id(parameter) in matrices
    }
    sharded = optimizer.data_parallel_group if isinstance(optimizer, DistributedOptimizer) else None
    own_sizes = {matrices[key].name: stop - start for key, (_, start, stop) in ranges.items()}
    everywhere = [own_sizes] if sharded is None else [own_sizes] * sharded.size()
    if sharded is not None:
        dist.all_gather_object(everywhere, own_sizes, group=sharded)
    names = {name for sizes in everywhere for name in sizes}
    held = []
    for key, matrix in matrices.items():
        if matrix.name in names:
            part = ranges[key][0] if key in ranges else None
            sizes = tuple(x.get(matrix.name, 0) for x in everywhere)
            assert sum(sizes) == math.prod(matrix.shape), f"{matrix.name}: parts of {sizes}, not {matrix.shape}"
            held.append(HeldMatrix(matrix, part, sizes))
    of_experts = any(x.matrix.of_experts for x in held)
    divided = expert_tensor_parallel_group() if of_experts else tensor_parallel_group()
    return Holders(tuple(held), divided, sharded)
