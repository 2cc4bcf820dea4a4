"""The router of a mixture of experts, with the terms that its run adds to the loss.

megatron-core's own terms are not used: they are multiplied by the number of all tokens, while gradients are divided by
the number of trained ones, so the effective coefficient would grow with the share of untrained tokens.

t: tokens of this rank, e: experts, k: experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from llava_mcore.parallel.context import DividedRow
from llava_mcore.parallel.groups import context_parallel_group
from llava_mcore.parallel.named_sums import with_loss

LOAD_BALANCING, ROUTER_Z = "load_balancing", "router_z"
"""Names of sums, each a mean over layers: e / k * sum(share of tokens * mean probability), 1 for an even load; the mean
square of the logarithm of the softmax's denominator."""


@dataclass(frozen=True)
class RouterLosses:
    """Weights of a router's terms beside the cross-entropy; 0: the term is not computed."""

    load_balancing: float = 0.0
    z: float = 0.0


class Router(TopKRouter):
    """megatron-core's router of k experts, which computes as transformers does."""

    losses = RouterLosses()
    token_weights: Tensor | None = None
    """[t], of the tokens in this call: see `token_weights`. None: no term is computed."""
    load: Tensor | None = None
    """Tokens of this rank that each expert has got in the current step, [e], without padding."""
    choices: list[tuple[Tensor, Tensor]] | None = None
    """Logits and choice of every call, if somebody collects them."""

    def gating(self, input: Tensor) -> Tensor:
        """Return logits [s, b, e] of tokens [s, b, h].

        On a GPU, megatron-core uses Transformer Engine's product, which rounds fp32 operands to TF32.
        """
        return F.linear(input, self.weight, self.bias)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return probabilities and choice of each token, [t, e] both, of logits [s, b, e]."""
        probs, chosen = super().routing(logits, padding_mask)
        if self.choices is not None:
            self.choices.append((logits, chosen))
        return self.with_terms(logits, chosen, probs), chosen

    def choose(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits [s, b, e], and probabilities and choice as of `routing`, without terms and loads: what depends
        on hidden states [s, b, h] and weights alone."""
        logits = self.gating(hidden_states)
        return logits, *super().routing(logits)

    def with_terms(self, logits: Tensor, chosen: Tensor, result: Tensor) -> Tensor:
        """Return `result`, the probabilities or what follows from them; its backward pass also reaches the terms.
        Remember the load."""
        if self.token_weights is None or not self.training:
            return result
        return self._with_losses(result, chosen, logits.view(-1, logits.shape[-1]), self.token_weights)

    def _with_losses(self, result: Tensor, chosen: Tensor, logits: Tensor, weights: Tensor) -> Tensor:
        """Report the load, and let the backward pass of `result` also reach the terms.

        With sequence and context parallelism each rank adds the part of its own tokens.
        """
        # Tokens of each expert and their number, over all tokens of the micro-batch.
        grad_enabled = torch.is_grad_enabled()
        is_counted = weights > 0
        with torch.no_grad():
            counts = torch.cat([(chosen & is_counted[:, None]).sum(0), is_counted.sum()[None]]).float()
            if grad_enabled:  # once, also where the backward pass computes layers again
                self.load = counts[:-1].clone() if self.load is None else self.load + counts[:-1]
            divided = self.config.sequence_parallel or self.config.context_parallel_size > 1
            if divided:
                dist.all_reduce(counts, group=self.tp_cp_group)
            of_experts, num_tokens = counts[:-1], counts[-1].clamp(min=1)
        options = {"config": self.config, "divided": divided}
        if self.losses.load_balancing:
            mean_probs = weights @ logits.softmax(-1, dtype=torch.float32)
            balance = len(of_experts) / self.topk * (of_experts / num_tokens) @ mean_probs
            name, coefficient = LOAD_BALANCING, self.losses.load_balancing
            result = with_loss(result, name, balance, weights.sum(), coefficient=coefficient, **options)
        if self.losses.z:
            z = weights @ logits.float().logsumexp(-1).square()
            result = with_loss(result, ROUTER_Z, z, weights.sum(), coefficient=self.losses.z, **options)
        return result


@dataclass(frozen=True)
class ExpertLoads:
    """The tokens of each expert in a step. `routers`: those of this rank's layers."""

    routers: tuple[Router, ...]
    num_layers: int
    num_experts: int

    @classmethod
    def of(cls, models: Sequence[MegatronModule]) -> ExpertLoads | None:
        """Return those of a rank's part of a model; None without experts."""
        config = models[0].config
        if config.num_moe_experts is None:
            return None
        routers = tuple(x for model in models for x in model.modules() if isinstance(x, Router))
        return cls(routers, config.num_layers, config.num_moe_experts)

    def take(self, device: torch.device) -> Tensor:
        """Return this rank's counts float64 [layers, experts], and begin again; summed over ranks they are the global
        batch's. Layers without experts, and of other stages, have zeros. No host sync."""
        counts = torch.zeros(self.num_layers, self.num_experts, dtype=torch.float64, device=device)
        for router in self.routers:
            if router.load is not None:
                counts[router.layer_number - 1] = router.load
            router.load = None
        return counts


def token_weights(
    config: TransformerConfig, loss_mask: Tensor | None, packed_seq_params: PackedSeqParams | None = None
) -> Tensor | None:
    """Return the weight of each token in the terms of routers, float32 [b, s]; of this rank's tokens only with sequence
    parallelism. A collective call with context parallelism.

    All tokens up to the last trained one of a row have the same weight. Later ones (padding, which only occurs at the
    end of a row, and tokens that predict nothing) have 0. The weights add up to the number of trained tokens, by which
    a step divides its sums.

    Args:
        loss_mask: float32 [b, s]; None outside of training.
        packed_seq_params: of the only row, if it is packed.
    """
    if loss_mask is None or config.num_moe_experts is None:
        return None
    if config.context_parallel_size > 1:  # the last trained token may be another rank's
        bounds = None if packed_seq_params is None else packed_seq_params.cu_seqlens_q
        row = DividedRow.of(loss_mask.shape[1], bounds, loss_mask.device, context_parallel_group())
        weights = row.local_part(_weights(row.gather(loss_mask.t()).t()).t()).t()
    else:
        weights = _weights(loss_mask)
    if config.sequence_parallel:
        part = tensor_parallel.scatter_to_sequence_parallel_region(weights.t().contiguous())
        weights = part.t().contiguous()
    return weights


def _weights(loss_mask: Tensor) -> Tensor:
    """Return the weights of all tokens of a micro-batch, [b, t]."""
    is_counted = loss_mask.flip(-1).cummax(-1).values.flip(-1).sign()
    return is_counted * (loss_mask.sum() / is_counted.sum().clamp(min=1))
