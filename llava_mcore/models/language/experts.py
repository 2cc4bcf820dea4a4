"""A mixture of experts in place of a layer's MLP: each token is computed by the few experts that its router chooses.

megatron-core has the layer, the router and the exchange of tokens between ranks. The experts are our own: the matrices
of all experts of a rank are one parameter, and one grouped product multiplies each expert's tokens.

    hidden [s, b, h] → router: k experts of each token and their probabilities
                     → dispatcher: tokens to the ranks of their experts, sorted by expert [t, h]
                     → fc1, silu(gate) * up * probability, fc2, a grouped product each
                     → dispatcher: back to the tokens' ranks, added up over experts

e: experts of this rank, t: tokens that came to them, h: hidden size, f: an expert's width on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.fp8_utils import is_first_last_bf16_layer
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from llava_mcore.compat.megatron.layers import change_class
from llava_mcore.compat.megatron.token_dispatcher import TokenDispatcher, pad_for_gloo
from llava_mcore.models.language.expert_parts import ExpertPart
from llava_mcore.models.language.grouped_fp8 import Fp8GroupedProduct, Fp8Matrices
from llava_mcore.models.language.grouped_products import FrozenGroupedProduct, grouped_product
from llava_mcore.models.language.router import Router


class ExpertLayer(MoELayer):
    """megatron-core's layer with a dispatcher that lets the host run ahead."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        if config.use_cpu_initialization:
            pad_for_gloo()
        super().__init__(config, *args, **kwargs)
        change_class(self.token_dispatcher, TokenDispatcher)
        self._routed: tuple[Tensor, Tensor] | None = None

    def set_layer_number(self, layer_number: int) -> None:
        """Store the layer's number from megatron-core, which determines whether the layer computes in FP8."""
        super().set_layer_number(layer_number)
        config, experts = self.config, self.experts
        in_fp8 = bool(config.fp8) and not is_first_last_bf16_layer(config, layer_number - 1)
        experts.linear_fc1.in_fp8 = experts.linear_fc2.in_fp8 = in_fp8

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Return the layer's output [s, b, h] and no bias.

        Args:
            padding_mask: what megatron-core hands to every layer, also where it computes one again: here the weights of
                tokens in the router's terms [b, s] (see `token_weights`).
        """
        self._take_weights(padding_mask)
        result: tuple[Tensor, None] = super().forward(hidden_states, intermediate_tensors)
        return result

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether the layer always computes the same number of tokens (this rank has all experts) and draws no random
        numbers.

        Adapters of experts are not submodules of the layer, which a graph's parameters have to be.
        """
        parts = self.experts.linear_fc1, self.experts.linear_fc2
        chooses = not self.config.moe_router_force_load_balancing
        return chooses and self.token_dispatcher.has_all_experts and not any(x.is_adapted for x in parts)

    def forward_chosen(
        self, hidden_states: Tensor, choice: tuple[Tensor, Tensor, Tensor], padding_mask: Tensor | None
    ) -> tuple[Tensor, None]:
        """Return the same as `forward` after the router has run: `choice` is the result of its `choose`."""
        self._take_weights(padding_mask)
        logits, probs, chosen = choice
        self._routed = self.router.with_terms(logits, chosen, probs), chosen
        try:
            result: tuple[Tensor, None] = super().forward(hidden_states)
        finally:
            self._routed = None
        return result

    def add_terms(self, choice: tuple[Tensor, Tensor], output: Tensor, padding_mask: Tensor | None) -> Tensor:
        """Return the output of this layer or of a later one, whose backward pass also reaches the router's terms.

        Args:
            choice: logits and choice of a pass without them.
        """
        self._take_weights(padding_mask)
        return self.router.with_terms(*choice, output)

    def _take_weights(self, padding_mask: Tensor | None) -> None:
        self.router.token_weights = None if padding_mask is None else padding_mask.t().reshape(-1)

    def route(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return probabilities and choice of each token (called by megatron-core)."""
        if self._routed is not None:
            return self._routed
        result: tuple[Tensor, Tensor] = super().route(hidden_states, padding_mask)
        return result


class Experts(MegatronModule):
    """The experts of one rank: gated MLPs without biases."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,
    ) -> None:
        """pg_collection: its groups `ep` (experts), `expt_tp` (parts of them) and `expt_dp` (their replicas)."""
        super().__init__(config)
        width = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        matrices = partial(ExpertMatrices, config, pg_collection, num_local_experts)
        self.linear_fc1 = matrices(2 * width, config.hidden_size, config.init_method, split_dim=1, num_blocks=2)
        self.linear_fc2 = matrices(config.hidden_size, width, config.output_layer_init_method, split_dim=2)
        self.recomputes = config.recompute_granularity == "selective" and "mlp" in config.recompute_modules

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Return the experts' outputs [t, h], times the probabilities of their tokens, and no bias.

        Args:
            hidden: [t, h], sorted by expert.
            tokens_per_expert: int64 [e].
            probs: [t].
        """
        ends = tokens_per_expert.cumsum(0).to(device=hidden.device, dtype=torch.int32)
        if self.recomputes and self.training:
            return tensor_parallel.checkpoint(self._mlp, False, hidden, ends, probs), None
        return self._mlp(hidden, ends, probs), None

    def _mlp(self, hidden: Tensor, ends: Tensor, probs: Tensor) -> Tensor:
        gate_and_up = self.linear_fc1(hidden, ends)
        if hidden.device.type == "cuda" and self.config.activation_func is F.silu:
            weighted = weighted_bias_swiglu_impl(gate_and_up, None, probs.unsqueeze(-1))
        else:
            gate, up = gate_and_up.chunk(2, dim=-1)
            weighted = (self.config.activation_func(gate) * up * probs.unsqueeze(-1)).to(gate_and_up.dtype)
        output: Tensor = self.linear_fc2(weighted, ends)
        return output

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are never delayed."""


class ExpertMatrices(MegatronModule):
    """One matrix of each expert of a rank, as one parameter [e, rows, columns].

    Several ranks may divide each matrix (expert tensor parallelism) along `split_dim` of the parameter. With two
    blocks, gate and up, a rank has its part of the first and then its part of the second.
    """

    def __init__(
        self,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        num_experts: int,
        rows: int,
        columns: int,
        init_method: Callable[[Tensor], Any],
        *,
        split_dim: int,
        num_blocks: int = 1,
    ) -> None:
        super().__init__(config)
        self.groups, self.split_dim, self.num_blocks = groups, split_dim, num_blocks
        self.make_weight: Callable[[], Tensor] | None = None
        self.fuse_wgrad_accumulation = False  # the name by which Transformer Engine's layers are found, too
        self.in_fp8 = False
        self.is_first_microbatch = True  # weights may have changed: the name that megatron-core's schedules look for
        self.fp8_matrices: Fp8Matrices | None = None
        self.is_adapted = False
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        weight = torch.empty(num_experts, rows, columns, dtype=config.params_dtype, device=device)
        self.weight = nn.Parameter(weight)
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=split_dim, stride=num_blocks)
        # Expert gradients are added up over other ranks than those of the rest of the model.
        apart = groups.ep.size() > 1 or groups.expt_tp.size() != groups.tp.size()
        vars(self.weight)["allreduce"] = not apart
        vars(self.weight)["of_experts"] = True  # what conversions compare with the mapping table
        if config.perform_initialization:
            with tensor_parallel.get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                for matrix in self.weight.data:
                    init_method(matrix)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Return [t, rows] of [t, columns]. ends: int32 [e], where the tokens of each expert end."""
        if self.make_weight is not None:
            output: Tensor = FrozenGroupedProduct.apply(x, self.make_weight, ends)
            return output
        if self.in_fp8:
            matrices = self._quantized(backward=torch.is_grad_enabled())
            output = Fp8GroupedProduct.apply(x, self.weight, ends, matrices, self.fuse_wgrad_accumulation)
            return output
        return grouped_product(x, self.weight, ends, adds_to_main_grad=self.fuse_wgrad_accumulation)

    def _quantized(self, *, backward: bool) -> Fp8Matrices:
        """Return the matrices in FP8, which are made in the first pass after the weights may have changed."""
        matrices = self.fp8_matrices
        may_be_old = matrices is None or self.is_first_microbatch or (backward and matrices.columns is None)
        if matrices is None or (may_be_old and self._has_weight):
            self.fp8_matrices = matrices = Fp8Matrices.of(self.weight, backward=backward, earlier=matrices)
            self.is_first_microbatch = False
        return matrices

    def update_fp8(self) -> None:
        """Quantize weights that may have changed, as a pass without a graph does by itself."""
        if self.in_fp8:
            self._quantized(backward=True)

    @property
    def _has_weight(self) -> bool:
        """False once the parameter is replaced by another form of it."""
        return isinstance(self.weight, nn.Parameter)

    def freeze_with(self, make_weight: Callable[[], Tensor], device: torch.device) -> None:
        """Replace the parameter by a tensor that is created on a device when needed, and never kept."""
        self._remove_weight(device)
        self.make_weight = make_weight

    def keep_in_fp8(self) -> None:
        """Replace the parameter by its two FP8 forms, one for each pass."""
        self.fp8_matrices = Fp8Matrices.of(self.weight, backward=True)
        self._remove_weight(self.weight.device)

    def _remove_weight(self, device: torch.device) -> None:
        marks, dtype = vars(self.weight), self.weight.dtype
        del self.weight
        without_values = torch.empty(0, dtype=dtype, device=device)  # through which adapters find these and the marks
        vars(without_values).update(marks)
        object.__setattr__(self, "weight", without_values)  # not as a parameter

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return the parameter as a part of the matrices of all experts: [experts, rows, columns], gate before up."""
        if not self._has_weight:
            return {}
        name, part = f"{prefix}weight", ExpertPart.of(self.groups, self.split_dim, self.num_blocks)
        return {name: part.sharded(name, self.weight, sharded_offsets)}


class SharedExpert(SharedExpertMLP):
    """The expert that computes every token beside the chosen ones; its ranks are those of an MLP."""

    def __init__(self, config: TransformerConfig, **kwargs: Any) -> None:
        plain = copy(config)
        plain.use_te_activation_func = False  # it would need a module of its own, which megatron-core does not give it
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        super().__init__(plain, submodules=linears, **kwargs)
        if self.gate_weight is not None and not config.use_cpu_initialization:  # megatron-core makes it on the host
            self.gate_weight.data = self.gate_weight.data.to(torch.cuda.current_device())


EXPERTS = partial(ExpertLayer, submodules=MoESubmodules(experts=Experts, router=Router, shared_experts=SharedExpert))
"""The module that replaces the MLP in the spec of a layer."""
