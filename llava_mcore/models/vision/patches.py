"""The vision transformer for packed patches of images of any size (Idefics2, Qwen2-VL and what came after them).

Patches of all images of a micro-batch are one sequence, in which attention keeps images (frames, windows) apart by
their lengths: nothing is padded. Everything that depends on the images' sizes comes as tensors from the host.

n: patches, m: patches that the connector merges into a feature, h: hidden size, l: number of feature layers, f: numbers
of a patch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.vision_module.vision_module import VisionModule
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from llava_mcore.media.batch_fields import (
    MEDIA_SEQLENS,
    PATCH_POSITIONS,
    PIXEL_VALUES,
    POSITION_ROWS,
    POSITION_WEIGHTS,
    WINDOW_ORDER,
    WINDOW_SEQLENS,
)
from llava_mcore.models.attention.flash import FlashAttention
from llava_mcore.models.norms import TorchNorm
from llava_mcore.models.rotary import PatchRopeSelfAttention
from llava_mcore.models.vision.attention import tower_attention, uses_flash_attention
from llava_mcore.models.vision.encoder_layers import clear_padding, encoder_layer_spec, use_fewer_kernels
from llava_mcore.models.vision.features import FeatureChoice
from llava_mcore.models.vision.replicated import process_groups
from llava_mcore.parallel.items import Items, MediaLengths
from llava_mcore.weights.names import LayerNames


@dataclass(frozen=True)
class PatchShape:
    """The differences between the families, beside TransformerConfig.

    `patch_dim`: f. `merged`: m, which are next to each other. `inv_freq`: float32 [head size / 4], of rows and of
    columns; None: nothing is rotated. `num_positions`: rows of the table of position embeddings; 0: there is none.
    `full_attention`: layers from 0 that see whole images, where the others see windows of `window_patches` at most;
    None: all see whole images. `post_norm`: the features are those after the tower's last norm. `names`,
    `layers_name`, `conv_name`: Hugging Face's, of the modules in a layer, the list of layers and the patch embedding.
    `ffn_size`: the width inside the MLPs without padding; None: they have none.
    """

    patch_dim: int
    merged: int
    conv_bias: bool
    inv_freq: Tensor | None
    names: LayerNames
    ffn_size: int | None = None
    num_positions: int = 0
    full_attention: frozenset[int] | None = None
    window_patches: int = 0
    post_norm: bool = False
    layers_name: str = "blocks."
    conv_name: str = "patch_embed"


@dataclass
class TowerSeqParams(PackedSeqParams):
    """Where images begin, and in `windows` where windows do."""

    windows: PackedSeqParams | None = None


class PatchLayer(TransformerLayer):
    """A layer that sees whole images, or windows of them."""

    def __init__(self, *args: Any, full_attention: frozenset[int] | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sees_windows = full_attention is not None and self.layer_number - 1 not in full_attention
        core = tower_attention(self.config, sees_windows=self.sees_windows)
        if core is not None:
            self.self_attention.core_attention = core
        if isinstance(core, FlashAttention):
            self.self_attention.padded_head = core.padded_head

    def forward(self, *args: Any, packed_seq_params: TowerSeqParams, **kwargs: Any) -> Any:
        """Run the layer on [n, 1, h]."""
        chosen = packed_seq_params.windows if self.sees_windows else packed_seq_params
        return super().forward(*args, packed_seq_params=chosen, **kwargs)


def layer_spec(config: TransformerConfig, shape: PatchShape) -> ModuleSpec:
    """Return the encoder layer, with rotary positions and windows."""
    spec = encoder_layer_spec(config, TorchNorm, attends_by_engine=not uses_flash_attention(config))
    spec.module, spec.params = PatchLayer, {"full_attention": shape.full_attention}
    spec.submodules.self_attention.module = PatchRopeSelfAttention
    return spec


class PatchTransformer(VisionModule):
    """Patches → positions → the layers up to the last feature layer → features."""

    def __init__(self, config: TransformerConfig, shape: PatchShape, features: FeatureChoice) -> None:
        super().__init__(config=config)
        self.shape, self.features, self.inv_freq = shape, features, shape.inv_freq
        self.sizes: tuple[int, ...] = ()
        """In ascending order. If there are any, blank patches fill up the layers' arguments to the next of them, beyond
        the largest to a multiple of 128, which suits every FP8 recipe."""
        hidden, dtype = config.hidden_size, config.params_dtype
        self.conv1 = nn.Linear(shape.patch_dim, hidden, bias=shape.conv_bias, dtype=dtype)
        if shape.num_positions:
            self.position_embeddings = nn.Embedding(shape.num_positions, hidden, dtype=dtype)
        self.decoder = TransformerBlock(
            config,
            layer_spec(config, shape),
            post_layer_norm=False,
            post_process=False,
            pg_collection=process_groups(config),
        )
        if shape.ffn_size is not None:
            for layer in self.decoder.layers:
                clear_padding(layer.mlp, shape.ffn_size, tp_rank=layer.tp_group.rank())
        if config.transformer_impl == "transformer_engine":
            use_fewer_kernels(self.decoder)
        if shape.post_norm:
            self.ln_post: nn.Module = TorchNorm(config, hidden, config.layernorm_epsilon)

    def blank(self, pixels: Tensor, media: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor], int]:
        """Return the arguments of a forward pass on one blank square of patches.

        Args:
            pixels, media: without any rows, of which dtypes and devices are taken.
        """
        n = self.shape.merged
        blanks = {name: media[name].new_zeros(n, *media[name].shape[1:]) for name in media}
        for name in (MEDIA_SEQLENS, WINDOW_SEQLENS):
            if name in media:
                blanks[name] = media[name].new_full((1,), n)
        if WINDOW_ORDER in media:
            blanks[WINDOW_ORDER] = media[WINDOW_ORDER].new_zeros(1)
        return pixels.new_zeros(n, self.shape.patch_dim), blanks, n

    def items(self, media: Mapping[str, Tensor], lengths: MediaLengths) -> Items:
        """Return what belongs to each image or frame: patches, squares of them, and the windows that they fill.

        Args:
            media: of which only names are looked at.
            lengths: the values of MEDIA_SEQLENS and WINDOW_SEQLENS.
        """
        patches = lengths[MEDIA_SEQLENS]
        of_patches = (PIXEL_VALUES, PATCH_POSITIONS, POSITION_ROWS, POSITION_WEIGHTS)
        rows: dict[str, Sequence[int]] = {name: patches for name in of_patches if name in media}
        rows[MEDIA_SEQLENS] = [1] * len(patches)
        if WINDOW_ORDER in media:
            rows[WINDOW_ORDER] = [n // self.shape.merged for n in patches]
            rows[WINDOW_SEQLENS] = windows_of(patches, lengths[WINDOW_SEQLENS])
        costs = [self.products(n) for n in patches]
        return Items(costs, patches, rows, numbering=frozenset({WINDOW_ORDER}), lengths=patches)

    def products(self, num_patches: int) -> int:
        """Return the multiplications of the layers for an image: most grow with its patches, those of attention to the
        whole image with their square."""
        h, window = self.config.hidden_size, self.shape.window_patches
        ffn_matrices = 3 if self.config.gated_linear_unit else 2
        weights = 4 * h * h + ffn_matrices * h * (self.shape.ffn_size or self.config.ffn_hidden_size)
        seen = sum(min(window, num_patches) if layer.sees_windows else num_patches for layer in self.decoder.layers)
        return num_patches * (len(self.decoder.layers) * weights + 2 * h * seen)

    def forward(self, patches: Tensor, media: Mapping[str, Tensor], max_seqlen: int) -> Tensor:
        """Return features [n, l * h], in the order of the patches or, if the tower has windows, of WINDOW_ORDER.

        Args:
            patches: [n, f].
            media: the other fields (see `batch_fields`).
            max_seqlen: the largest of MEDIA_SEQLENS.
        """
        x = self.conv1(patches)  # [n, h]
        if self.shape.num_positions:
            table = self.position_embeddings(media[POSITION_ROWS])  # [n, h] or [n, 4, h]
            if POSITION_WEIGHTS in media:
                table = (table * media[POSITION_WEIGHTS].unsqueeze(-1)).sum(1).to(x.dtype)
            x = x + table
        angles = self._angles(media)
        if WINDOW_ORDER in media:
            x = self._by_window(x, media[WINDOW_ORDER])
            angles = None if angles is None else self._by_window(angles, media[WINDOW_ORDER])
        angles = None if angles is None else angles[:, None, None]
        missing = self._filled_up(len(x)) - len(x)
        if missing:
            x, angles = _with_rows(x, missing), None if angles is None else _with_rows(angles, missing)
            media, max_seqlen = self._with_blank(media, missing), max(max_seqlen, missing)
        taken = self._hidden_states(x[:, None], angles, self._packed(media, max_seqlen))
        out = torch.cat([state.squeeze(1)[: len(patches)] for state in taken], dim=-1)
        return self.ln_post(out) if self.shape.post_norm else out

    def _filled_up(self, patches: int) -> int:
        """Return the size that a number of patches is filled up to."""
        if not self.sizes:
            return patches
        return next((size for size in self.sizes if size >= patches), -(-patches // 128) * 128)

    def _with_blank(self, media: Mapping[str, Tensor], patches: int) -> dict[str, Tensor]:
        """Return the lengths of images and windows, one blank image of so many patches included."""
        lengths = {MEDIA_SEQLENS: F.pad(media[MEDIA_SEQLENS], (0, 1), value=patches)}
        if WINDOW_SEQLENS in media:
            full, rest = divmod(patches, self.shape.window_patches)
            windows = F.pad(media[WINDOW_SEQLENS], (0, full), value=self.shape.window_patches)
            lengths[WINDOW_SEQLENS] = F.pad(windows, (0, 1), value=rest) if rest else windows
        return lengths

    def _by_window(self, x: Tensor, order: Tensor) -> Tensor:
        """Return what patches have [n, …] in the order of the windows."""
        return x.unflatten(0, (-1, self.shape.merged))[order].flatten(0, 1)

    def _angles(self, media: Mapping[str, Tensor]) -> Tensor | None:
        """Return rotary angles [n, head size] of the rows and columns of patches; None if nothing is rotated."""
        if self.inv_freq is None:
            return None
        positions = media[PATCH_POSITIONS]  # [n, 2]
        if self.inv_freq.device != positions.device:
            self.inv_freq = self.inv_freq.to(positions.device)
        angles = (positions.unsqueeze(-1).float() * self.inv_freq).flatten(1)  # [n, head size / 2]
        return torch.cat((angles, angles), dim=-1)

    def _packed(self, media: Mapping[str, Tensor], max_seqlen: int) -> TowerSeqParams:
        """Return where images and windows begin."""
        windows = None
        if WINDOW_SEQLENS in media:
            windows = PackedSeqParams(**packed_bounds(media[WINDOW_SEQLENS], self.shape.window_patches))
        return TowerSeqParams(**packed_bounds(media[MEDIA_SEQLENS], max_seqlen), windows=windows)

    def _hidden_states(self, x: Tensor, angles: Tensor | None, packed: TowerSeqParams) -> list[Tensor]:
        """Return the chosen hidden states [n, 1, h], in the order of the choice."""
        last = self.features.num_layers
        inner = {i - 1 for i in self.features.layers if i < last}
        if torch.is_grad_enabled() and self.config.recompute_granularity is not None and not x.requires_grad:
            x.requires_grad_()  # recomputation skips what has no input with a gradient
        result = self.decoder(
            hidden_states=x,
            attention_mask=None,
            rotary_pos_emb=angles,
            packed_seq_params=packed,
            extract_layer_indices=inner,
        )
        final, extracted = result if inner else (result, [])
        states = {last: final} | dict(zip((i + 1 for i in sorted(inner)), extracted, strict=True))
        return [states[i] for i in self.features.layers]


def _with_rows(x: Tensor, num_rows: int) -> Tensor:
    """Return x with so many rows of zeros after its own."""
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, num_rows))


def windows_of(patches: Sequence[int], windows: Sequence[int]) -> list[int]:
    """Return how many windows each image has, of the patches in every image and in every window."""
    ends = {end: index for index, end in enumerate(accumulate(windows), 1)}
    indices = [ends[end] for end in accumulate(patches)]
    return [after - before for before, after in pairwise([0, *indices])]


def packed_bounds(lengths: Tensor, max_seqlen: int) -> dict[str, Any]:
    """Return the arguments of PackedSeqParams for sequences of these lengths, int32. `max_seqlen`: none is longer."""
    return packed_arguments(F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), max_seqlen)


def packed_arguments(bounds: Tensor, longest: int) -> dict[str, Any]:
    """Return the arguments of PackedSeqParams for sequences that begin at `bounds`, int32 [n + 1]."""
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": bounds,
        "cu_seqlens_kv": bounds,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }
