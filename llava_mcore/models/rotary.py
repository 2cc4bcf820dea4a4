"""Self-attention whose rotary angles are given for each token, not for each index of a sequence.

megatron-core's own application of angles to packed sequences counts every sequence from 0 again unless the sum of their
lengths happens to be the number of angles (`_apply_rotary_pos_emb_thd`, 0.19.2), and Transformer Engine's kernel for
packed sequences always does. Here no lengths are looked at: token i is rotated by angle i, packed or not.

s: tokens, b: samples, n: heads, d: head size, r: rotated dims of a head.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from megatron.core.models.common.embeddings.rope_utils import fused_apply_rotary_pos_emb
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor


class Rotation:
    """Rotary angles [s, b or 1, 1, r] of tokens, whose halves are equal. Their cosines and sines are computed once for
    all heads that they rotate."""

    def __init__(self, angles: Tensor) -> None:
        self.angles = angles
        self._cos_sin: dict[tuple[float, torch.dtype], tuple[Tensor, Tensor]] = {}

    def cos_sin(self, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines times a factor; the first half of the sines is negative."""
        key = factor, dtype
        if key not in self._cos_sin:
            cos, sin = ((f(self.angles) * factor).to(dtype) for f in (torch.cos, torch.sin))
            first, second = sin.chunk(2, dim=-1)
            self._cos_sin[key] = cos, torch.cat((-first, second), dim=-1)
        return self._cos_sin[key]


class TokenRopeSelfAttention(SelfAttention):
    """Takes `rotary_pos_emb` as angles [s, b or 1, 1, r], one row per token, or as a `Rotation` that layers share.

    `factor`: of cosines and sines (YaRN), where they are not fused. `padded_head`: the size that heads get for core
    attention, with zeros at their end; None: that of the heads. Only where one kernel splits and rotates.
    """

    in_float32: ClassVar[bool] = False
    """Whether products are taken in float32 instead of the heads' own precision."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.factor = 1.0
        self.padded_head: int | None = None
        self._rotation: Rotation | None = None

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Any:
        """Rotate queries and keys as soon as they are computed, before they are flattened for packed attention."""
        angles = kwargs.pop("rotary_pos_emb", None)
        self._rotation = Rotation(angles) if isinstance(angles, Tensor) else angles
        try:
            return super().forward(hidden_states, attention_mask, **kwargs)
        finally:
            self._rotation = None

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Return query, key and value [s, b, n, d], the first two rotated (called by megatron-core's forward)."""
        if self._rotation is not None and self._splits_rotated:
            mixed, (*_, size) = super().get_query_key_value_tensors(*args, **kwargs | {"split_qkv": False})
            return split_rotated(mixed, self._rotation.angles, size, self.padded_head)
        query, key, *rest = super().get_query_key_value_tensors(*args, **kwargs)
        if self._rotation is None:
            return (query, key, *rest)
        return (self._rotate(query, self._rotation), self._rotate(key, self._rotation), *rest)

    @property
    def _splits_rotated(self) -> bool:
        """Whether one kernel splits and rotates, which it can if nothing comes between."""
        norms = self.q_layernorm, self.k_layernorm
        return self.config.apply_rope_fusion and all(x is None or isinstance(x, IdentityOp) for x in norms)

    def _rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        if self.config.apply_rope_fusion:
            return rotate_fused(x, rotation.angles)
        return rotate(x, rotation, factor=self.factor, in_float32=self.in_float32)


class PatchRopeSelfAttention(TokenRopeSelfAttention):
    """As Hugging Face's vision towers, which rotate in float32."""

    in_float32 = True


def rotate(x: Tensor, rotation: Rotation, *, factor: float = 1.0, in_float32: bool = False) -> Tensor:
    """Rotate the first r dims of heads [s, b, n, d].

    Args:
        factor: of cosines and sines (YaRN).
        in_float32: whether products are taken in float32 instead of x's precision.
    """
    r = rotation.angles.shape[-1]
    turned, unrotated = x[..., :r], x[..., r:]
    dtype = torch.float32 if in_float32 else x.dtype
    turned = turned.to(dtype)
    cos, sin = rotation.cos_sin(factor, dtype)
    first, second = turned.chunk(2, dim=-1)
    turned = (turned * cos + torch.cat((second, first), dim=-1) * sin).to(x.dtype)
    return torch.cat((turned, unrotated), dim=-1) if unrotated.shape[-1] else turned


def rotate_fused(x: Tensor, angles: Tensor) -> Tensor:
    """As `rotate`, by Transformer Engine's kernel; products are taken in float32.

    The kernel shares angles between samples, so that all tokens are handed over as those of one sample.
    """
    return fused_apply_rotary_pos_emb(x.flatten(0, 1)[:, None], _of_each_token(angles, x)[:, None, None]).view(x.shape)


def split_rotated(mixed: Tensor, angles: Tensor, size: int, padded: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value [s, b, n, d], the first two as `rotate_fused` rotates them.

    Args:
        mixed: [s, b, groups of heads, (query heads of a group + 2) * d]: a group's query heads, its key and its value.
        size: d.
        padded: the last dimension of the results, which end with zeros; None: d.
    """
    from llava_mcore.models.kernels.split_rotated import SplitRotated  # on GPUs only

    s, b = mixed.shape[:2]
    padded = size if padded is None else padded
    parts = SplitRotated.apply(mixed.flatten(0, 1), _of_each_token(angles, mixed), size, padded)
    query, key, value = (x.view(s, b, -1, padded) for x in parts)
    return query, key, value


def _of_each_token(angles: Tensor, x: Tensor) -> Tensor:
    """Return the angles [s * b, r] of the tokens of x [s, b, ..]."""
    return angles.expand(*x.shape[:2], 1, -1).flatten(0, 2)
