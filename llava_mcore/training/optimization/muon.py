"""Muon for the matrices of linear layers, and AdamW for everything else, as one optimizer.

Muon's update of a matrix is its momentum with all singular values moved close to one. Computing it needs the whole
matrix, but a rank has only a part: tensor parallelism divides the matrix, and the distributed optimizer shards its
momentum. So all parts are sent to one rank, a different one for each matrix. It computes the update and sends every
part back. No update is computed twice, and it is the same at every layout.
"""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor
from torch.nn import Parameter

from llava_mcore.compat.emerging_optimizers import coefficients_of, matmul_precision, scale_of
from llava_mcore.compat.megatron.optimizer import replace_inner
from llava_mcore.config.rules.muon import MUON_MISSING
from llava_mcore.config.sections.optimizer import OptimizerConfig
from llava_mcore.errors import ConfigError
from llava_mcore.parallel.collectives import exchange
from llava_mcore.training.optimization.muon_matrices import HeldMatrix, Holders, Matrix, find_holders
from llava_mcore.training.optimization.newton_schulz import Coefficients, orthogonalized

ADAM = "adam"
"""Value of `optimizer` in the parameter groups of AdamW; those of Muon have none."""
ADAM_STATE = ("exp_avg", "exp_avg_sq")
MUON_STATE = ("momentum_buffer",)
STEP = "step"


@dataclass(frozen=True)
class MuonSettings:
    """How Muon computes an update."""

    momentum: float
    nesterov: bool
    precision: str
    coefficients: Coefficients
    scale: str
    scale_factor: float

    @classmethod
    def of(cls, options: OptimizerConfig) -> MuonSettings:
        """Return a run's settings. Raises ConfigError if a package is missing."""
        if find_spec("emerging_optimizers") is None:
            raise ConfigError(MUON_MISSING, on_all_ranks=True)
        return cls(
            options.muon_momentum,
            options.muon_nesterov,
            options.muon_matmul_precision,
            coefficients_of(options.muon_coefficients, options.muon_steps),
            options.muon_scale,
            options.muon_scale_factor,
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the iteration and of updates."""
        return torch.bfloat16 if self.precision == "medium" else torch.float32

    def orthogonalize(self, matrix: Tensor) -> Tensor:
        """Return an update of a matrix, or of each of a stack of them."""
        *_, rows, columns = matrix.shape
        scale = scale_of(rows, columns, self.scale) * self.scale_factor
        return orthogonalized(matrix, self.coefficients, scale=scale, dtype=self.dtype)


class MuonAndAdamW(torch.optim.Optimizer):
    """Takes the place of an AdamW that megatron-core has built, with its parameter groups.

    torch's AdamW counts updates per parameter, Transformer Engine's per group; Muon's parameters are counted likewise.
    """

    def __init__(self, adam: torch.optim.Optimizer, holders: Holders, settings: MuonSettings) -> None:
        super().__init__([{"params": []}], adam.defaults)
        self.param_groups = adam.param_groups  # torch would refuse them: in fp32, shards are views of parameters
        self._adam, self._holders, self._settings = adam, holders, settings
        self._rounds = holders.rounds()
        self.counts_per_parameter = isinstance(adam, torch.optim.AdamW)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = self._new_state(parameter, self.moments_of(group))

    def moments_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the state tensors of a group's parameters."""
        return ADAM_STATE if group["optimizer"] == ADAM else MUON_STATE

    def _new_state(self, parameter: Parameter, names: Sequence[str]) -> dict[str, Tensor]:
        moments = {name: torch.zeros_like(parameter) for name in names}
        return {STEP: torch.tensor(0.0), **moments} if self.counts_per_parameter else moments

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters; a collective call of the ranks that have parts of the same matrices."""
        self._adam.param_groups = [x for x in self.param_groups if x["optimizer"] == ADAM]
        self._adam.state = self.state
        self._adam.step()
        groups = {id(p): x for x in self.param_groups if x["optimizer"] != ADAM for p in x["params"]}
        with matmul_precision(self._settings.precision):
            for matrices in self._rounds:
                self._update(matrices, groups)
        self._count()

    def _update(self, matrices: Sequence[HeldMatrix], groups: Mapping[int, Mapping[str, Any]]) -> None:
        """Update the matrices of a round: at most one per rank."""
        directions = [None if x.held is None else self._direction(x.held) for x in matrices]
        for x, update in zip(matrices, self._orthogonalized(matrices, directions), strict=True):
            if x.held is not None:
                group = groups[id(x.held)]
                if group["weight_decay"]:
                    x.held.mul_(1.0 - group["lr"] * group["weight_decay"])
                x.held.add_(update.view_as(x.held), alpha=-group["lr"])

    def _direction(self, held: Parameter) -> Tensor:
        """Add a gradient to its momentum and return this rank's part of what is orthogonalized."""
        assert held.grad is not None, "megatron-core gives every trained parameter a gradient"
        momentum, settings = self.state[held]["momentum_buffer"], self._settings
        momentum.lerp_(held.grad, 1.0 - settings.momentum)
        return held.grad.lerp(momentum, settings.momentum) if settings.nesterov else momentum

    def _orthogonalized(self, matrices: Sequence[HeldMatrix], directions: Sequence[Tensor | None]) -> list[Tensor]:
        """Return this rank's parts of the updates, flat. The rank at place (s, d) of the two groups computes matrix
        s * (size of the second group) + d of the round."""
        sharded, divided = self._holders.sharded, self._holders.divided
        like = self._like()
        size = divided.size()
        owners = [i // size for i in range(len(matrices))]
        flat = [like.new_empty(0) if x is None else x.flatten() for x in directions]
        if sharded is None:
            return self._over_divided([x.matrix for x in matrices], flat, like)
        # Every rank of `sharded` gets whole parts of a few matrices, and sends back the shards of their updates.
        me, ranks = sharded.rank(), range(sharded.size())
        to_compute = [x for x, owner in zip(matrices, owners, strict=True) if owner == me]
        to_owners = [[x for x, owner in zip(flat, owners, strict=True) if owner == rank] for rank in ranks]
        shards = exchange(to_owners, [[x.sizes[rank] for x in to_compute] for rank in ranks], sharded, like)
        gathered = [torch.cat([shards[rank][i] for rank in ranks]) for i in range(len(to_compute))]
        updates = self._over_divided([x.matrix for x in to_compute], gathered, like)
        cut = [update.split(list(x.sizes)) for x, update in zip(to_compute, updates, strict=True)]
        sizes = [[x.sizes[me] for x, owner in zip(matrices, owners, strict=True) if owner == rank] for rank in ranks]
        returned = exchange([[x[rank] for x in cut] for rank in ranks], sizes, sharded, like.to(self._settings.dtype))
        return [x for of_owner in returned for x in of_owner]

    def _over_divided(self, matrices: Sequence[Matrix], parts: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """Return the updates, flat, where each tensor-parallel rank has its part of at most one matrix per rank."""
        group = self._holders.divided
        me, ranks = group.rank(), range(group.size())
        shaped = [part.view(x.shape) for x, part in zip(matrices, parts, strict=True)]
        if group.size() == 1:
            return [
                x.orthogonalized([p], self._settings.orthogonalize)[0].flatten()
                for x, p in zip(matrices, shaped, strict=True)
            ]
        assigned = matrices[me] if me < len(matrices) else None
        # A matrix that is not divided need not be sent: its owner has it already.
        outgoing = [[shaped[i]] if i < len(matrices) and matrices[i].split is not None else [] for i in ranks]
        is_divided = assigned is not None and assigned.split is not None
        incoming = [[assigned.shape.numel()] if assigned is not None and is_divided else [] for _ in ranks]
        received = exchange(outgoing, incoming, group, like)
        updates: list[list[Tensor]] = [[] for _ in ranks]
        if assigned is not None:
            received_parts = [x[0].view(assigned.shape) for x in received] if is_divided else [shaped[me]]
            results = assigned.orthogonalized(received_parts, self._settings.orthogonalize)
            updates = [[results[i if is_divided else 0]] for i in ranks]
        sizes = [[matrices[i].shape.numel()] if i < len(matrices) else [] for i in ranks]
        received = exchange(updates, sizes, group, like.to(self._settings.dtype))
        return [x for of_rank in received for x in of_rank]

    def _like(self) -> Tensor:
        """Return an fp32 tensor on the device of the parameters."""
        return torch.empty(0, dtype=torch.float32, device=self._holders.matrices[0].matrix.parameter.device)

    def _count(self) -> None:
        """Count an update of Muon's parameters, as AdamW has counted its own."""
        for group in self.param_groups:
            if group["optimizer"] == ADAM or not group["params"]:
                continue
            if self.counts_per_parameter:
                for parameter in group["params"]:
                    self.state[parameter][STEP] += 1
            else:
                group[STEP] = group.get(STEP, 0) + 1


def use_muon(optimizers: Sequence[MegatronOptimizer], matrices: Mapping[int, Matrix], options: OptimizerConfig) -> None:
    """Make optimizers that megatron-core has built with AdamW update matrices by Muon; a collective call.

    Matrices must be in parameter groups of their own, which are not marked as AdamW's.
    """
    settings = MuonSettings.of(options)
    for one in optimizers:
        holders = find_holders(one, matrices)
        if one.optimizer is None:
            continue
        for group in one.optimizer.param_groups:
            group.setdefault("optimizer", None)
        replace_inner(one, MuonAndAdamW(one.optimizer, holders, settings))
