"""The kernels that GPUs use for soft-capped scores compute what the plain operations do. Here they are not compiled."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from llava_mcore.models import fused_attention
from llava_mcore.models.attention import SDPAttention

BOUNDS = [0, 130, 131, 400, 400, 900]
OPTIONS = {"scale": 0.25, "softcap": 5.0}


@pytest.mark.parametrize("window", [None, 70, 300])
def test_capped_scores_in_windows_and_packs(window: int | None) -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True, attention_dropout=0.0
    )
    config.window_size = None if window is None else (window - 1, 0)
    plain = SDPAttention(config, 1, AttnMaskType.causal, "self", softmax_scale=0.25, softcap=5.0)
    query, key, value = (torch.randn(900, heads, 16) * 3 for heads in (4, 2, 2))
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    params = PackedSeqParams("thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=500, max_seqlen_kv=500)
    fused = fused_attention.attend_packed(query, key, value, bounds, 500, window=window, **OPTIONS)
    torch.testing.assert_close(fused, plain(query, key, value, packed_seq_params=params), rtol=1e-4, atol=1e-5)
    rows = [x.unflatten(0, (450, 2)) for x in (query, key, value)]
    fused = fused_attention.attend_rows(*rows, window=window, **OPTIONS)
    torch.testing.assert_close(fused, plain(*rows), rtol=1e-4, atol=1e-5)


def test_layers_of_a_micro_batch_share_their_masks() -> None:
    bounds, device = torch.tensor(BOUNDS, dtype=torch.int32), torch.device("cpu")
    mask = fused_attention._mask(bounds, 900, 70, device)
    assert fused_attention._mask(bounds, 900, 70, device) is mask
    assert fused_attention._mask(bounds, 900, None, device) is not mask
    assert fused_attention._mask(bounds.clone(), 900, 70, device) is not mask
    assert mask.sparsity() > 65, "blocks beyond the window and of other sequences are not computed"
    for length in range(20):
        fused_attention._mask(None, 100 + length, None, device)
    assert len(fused_attention._recent) <= 8
