"""Dropout in attention draws from the generator that tensor-parallel ranks have each for themselves."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import pytest
import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from llava_mcore.adapters.lora import Division, LinearAdapter
from llava_mcore.models.attention.sdpa import SDPAttention
from llava_mcore.parallel.groups import single_process
from llava_mcore.parallel.random import random_state, seed_everything


def test_recomputation_with_sequence_parallelism_draws_the_same_masks() -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, attention_dropout=0.5, use_cpu_initialization=True
    )
    config.sequence_parallel = True  # the constructor wants several ranks for it
    attention = SDPAttention(config, 1, AttnMaskType.causal, "self").train()
    adapter = object.__new__(LinearAdapter)
    adapter.division, adapter.dropout = Division(2, 0, False, sequence_parallel=True), 0.5
    ones, drawn = torch.ones(9, 1, 2, 8), []

    def layer(x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(x, 0.5)  # as Transformer Engine's attention draws then
        masks = attention(ones, ones, ones).detach(), adapter._dropped(torch.ones(9, 16), 0)
        drawn.append(torch.stack([masks[0].squeeze(1), masks[1]]))
        return x * drawn[-1].sum()

    with single_process():
        seed_everything(3)
        x = torch.ones(4, requires_grad=True)
        with tensor_parallel.get_cuda_rng_tracker().fork():  # TransformerBlock's
            y = tensor_parallel.checkpoint(layer, False, tensor_parallel.checkpoint(layer, False, x))
        y.sum().backward()
    first, second, second_again, first_again = drawn
    assert torch.equal(first, first_again) and torch.equal(second, second_again)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("packed", [False, True])
def test_the_generator_that_all_ranks_share_is_left_alone(packed: bool) -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, attention_dropout=0.5, use_cpu_initialization=True
    )
    attention = SDPAttention(config, 1, AttnMaskType.causal, "self").train()
    x = torch.randn(9, 2, 8) if packed else torch.randn(9, 1, 2, 8)
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    params = PackedSeqParams("thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds) if packed else None
    with single_process():
        seed_everything(3)
        before = random_state()
        first, second = (attention(x, x, x, packed_seq_params=params) for _ in range(2))
        after = random_state()
    assert not torch.equal(first, second), "there is dropout"
    assert torch.equal(before["torch"], after["torch"])
    assert any(not torch.equal(before["tracker"][name], state) for name, state in after["tracker"].items())
