"""Whisper's encoder as in Qwen2-Audio, for packed clips of different lengths.

Hugging Face's pads every clip to 30 seconds of silence, computes on all of it, and masks attention to the padding. Here
the rows of all clips are one sequence: convolutions and attention stop at a clip's end, and nothing is padded.

c: clips, r: rows of mel frames, n: hidden frames of all clips, m: features, h: hidden size, f: mel bins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.vision_module.vision_module import VisionModule
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from llava_mcore.media.batch_fields import FEATURE_POSITIONS, MEDIA_SEQLENS, PIXEL_VALUES
from llava_mcore.models.vision.encoder_layers import encoder_layer_spec, use_fewer_kernels
from llava_mcore.models.vision.patches import packed_bounds
from llava_mcore.models.vision.replicated import process_groups
from llava_mcore.parallel.items import Items, MediaLengths
from llava_mcore.weights.layouts import FuseQKV
from llava_mcore.weights.names import LayerNames


@dataclass(frozen=True)
class AudioShape:
    """Sizes that TransformerConfig has no field for. `names`, `layers_name`: Hugging Face's."""

    num_mel_bins: int
    num_positions: int
    names: LayerNames
    layers_name: str = "layers."


class KeylessBiasAttention(SelfAttention):
    """Self-attention whose keys have no bias.

    megatron-core has one bias for queries, keys and values. A bias of the keys does not change the differences of
    scores, so its gradient is zero up to rounding. An optimizer would amplify the rounding errors, so it is set to
    exactly zero.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        bias = self.linear_qkv.bias
        if bias.requires_grad:
            bias.register_hook(self._without_keys)

    def _without_keys(self, gradient: Tensor) -> Tensor:
        """Return the gradient of this rank's biases with zeros for keys."""
        heads = FuseQKV(self.num_attention_heads_per_partition, self.num_query_groups_per_partition)
        query, key, value = heads.to_hf(gradient)
        return heads.to_megatron(query, torch.zeros_like(key), value)


def layer_spec(config: TransformerConfig) -> ModuleSpec:
    """Return the encoder layer, whose keys have no bias."""
    spec = encoder_layer_spec(config)
    spec.submodules.self_attention.module = KeylessBiasAttention
    return spec


class AudioTransformer(VisionModule):
    """Mel frames → two convolutions → positions → layers → pairs of frames averaged → norm."""

    def __init__(self, config: TransformerConfig, shape: AudioShape) -> None:
        super().__init__(config=config)
        self.shape = shape
        hidden, dtype = config.hidden_size, config.params_dtype
        self.conv1 = nn.Conv1d(shape.num_mel_bins, hidden, kernel_size=3, padding=1, dtype=dtype)
        self.conv2 = nn.Conv1d(hidden, hidden, kernel_size=3, stride=2, dtype=dtype)
        self.position_embeddings = nn.Embedding(shape.num_positions, hidden, dtype=dtype)
        self.position_embeddings.requires_grad_(False)  # sinusoids
        self.decoder = TransformerBlock(
            config,
            layer_spec(config),
            post_layer_norm=False,
            post_process=False,
            pg_collection=process_groups(config),
        )
        self.ln_post = WrappedTorchNorm(config=config, hidden_size=hidden, eps=config.layernorm_epsilon)
        if config.transformer_impl == "transformer_engine":
            use_fewer_kernels(self.decoder)

    def blank(self, pixels: Tensor, media: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor], int]:
        """Return the arguments of a forward pass on a clip of one feature.

        Args:
            pixels, media: empty tensors that supply dtypes and devices.
        """
        blank_media = {
            MEDIA_SEQLENS: media[MEDIA_SEQLENS].new_full((1,), 2),
            FEATURE_POSITIONS: media[FEATURE_POSITIONS].new_zeros(1),
        }
        return pixels.new_zeros(6, self.shape.num_mel_bins), blank_media, 2

    def items(self, media: Mapping[str, Tensor], lengths: MediaLengths) -> Items:
        """Return what belongs to each clip; `lengths`: the values of MEDIA_SEQLENS."""
        hidden = lengths[MEDIA_SEQLENS]
        features = [n // 2 for n in hidden]
        rows = {
            PIXEL_VALUES: [2 * n + 2 for n in hidden],
            MEDIA_SEQLENS: [1] * len(hidden),
            FEATURE_POSITIONS: features,  # only their number matters here
        }
        return Items(hidden, features, rows, lengths=hidden)

    def forward(self, rows: Tensor, media: Mapping[str, Tensor], max_seqlen: int) -> Tensor:
        """Return features [m, h].

        Args:
            rows: [r, f]; of each clip a zero row, then its mel frames 0 to twice its hidden frames.
            media: the other fields (see `batch_fields`): the hidden frames of each clip, and m by their positions.
            max_seqlen: the largest of MEDIA_SEQLENS.
        """
        lengths = media[MEDIA_SEQLENS].long()
        clips = _Clips(lengths, len(rows) // 2 - len(lengths), len(media[FEATURE_POSITIONS]))
        x = self._convolved(rows, clips) + self.position_embeddings(clips.positions)
        if torch.is_grad_enabled() and self.config.recompute_granularity is not None and not x.requires_grad:
            x.requires_grad_()  # recomputation skips modules without an input that has a gradient
        packed = PackedSeqParams(**packed_bounds(media[MEDIA_SEQLENS], max_seqlen))
        x = self.decoder(hidden_states=x[:, None], attention_mask=None, packed_seq_params=packed)
        return self.ln_post(x.squeeze(1)[clips.pairs].mean(dim=1))

    def _convolved(self, rows: Tensor, clips: _Clips) -> Tensor:
        """Return the hidden frames [n, h] of rows [r, f].

        A clip's rows are an even number, so that each clip's frames begin at a stride of the second convolution. Its
        zero row stands for the padding of both convolutions; between two clips one output belongs to neither.
        """
        x = F.gelu(self.conv1(rows.t()[None]))
        x = x.index_fill(2, clips.first_rows, 0.0)
        return F.gelu(self.conv2(x))[0].t()[clips.frames]


class _Clips:
    """Where clips are in packed sequences, computed on the device without waiting for it.

    `first_rows`: int64 [c]. `frames`: int64 [n], the outputs of the second convolution that belong to a clip.
    `positions`: int64 [n], from 0 in each clip. `pairs`: int64 [m, 2], the frames of each feature.
    """

    def __init__(self, lengths: Tensor, num_frames: int, num_features: int) -> None:
        """lengths: int64 [c], the hidden frames of each clip. num_frames, num_features: n and m."""
        starts, indices = lengths.cumsum(0) - lengths, torch.arange(len(lengths), device=lengths.device)
        counted = torch.arange(num_frames, device=lengths.device)
        self.first_rows = 2 * (starts + indices)
        self.frames = counted + torch.repeat_interleave(indices, lengths, output_size=num_frames)
        self.positions = counted - torch.repeat_interleave(starts, lengths, output_size=num_frames)
        halves = lengths // 2
        before = starts - 2 * (halves.cumsum(0) - halves)
        firsts = torch.repeat_interleave(before, halves, output_size=num_features)
        firsts = firsts + 2 * torch.arange(num_features, device=lengths.device)
        self.pairs = torch.stack((firsts, firsts + 1), dim=1)
