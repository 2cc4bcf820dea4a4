"""Arguments of a graph: tensors whose shapes are few, in place of packs, of which no two are alike.

t: tokens or patches, h: hidden size, d: rotated dims of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from llava_mcore.models.language.decoder import LanguageModel
from llava_mcore.models.vision.patches import PatchTransformer, TowerSeqParams, packed_arguments

PICTURES = (8, 32)
"""Pictures of a pack that graphs of a tower have room for. More room costs time, as cuDNN plans for all of it, and more
choices cost memory."""

Sample = tuple[Tensor, ...]
"""What one graph takes; its memory is the graph's own."""


class Packs(Protocol):
    """How layers' arguments become tensors, and tensors arguments again."""

    def tensors(self, hidden_states: Tensor, packed: PackedSeqParams, angles: Tensor | None) -> tuple[Tensor, ...]:
        """Return what a graph takes; the first are the hidden states [t, 1, h]. Their shapes choose the graph."""

    def arguments(self, *tensors: Tensor) -> tuple[PackedSeqParams, Tensor | None]:
        """Return where samples begin, and rotary angles, of what `tensors` returned."""

    def samples(self, seen: Sequence[Sample]) -> Iterator[list[Sample]]:
        """Yield arguments of every graph of a model, for all shapes that are needed if this one is.

        Args:
            seen: of every graph, from one pass.
        """

    def describe(self, tensors: tuple[Tensor, ...]) -> str:
        """Return what a graph of these shapes is for."""


class TokenPacks:
    """Packs of tokens, all of the same length."""

    def __init__(self, model: LanguageModel, longest: int) -> None:
        """`longest`: largest length of a sample."""
        self._model, self._longest = model, longest
        self._bounds: tuple[PackedSeqParams, Tensor] | None = None
        self._table: Tensor | None = None

    def tensors(self, hidden_states: Tensor, packed: PackedSeqParams, angles: Tensor | None) -> tuple[Tensor, ...]:
        """Return hidden states, where samples begin, and angles."""
        assert angles is not None
        return hidden_states, self._padded_bounds(packed), self._angles(angles)

    def arguments(self, *tensors: Tensor) -> tuple[PackedSeqParams, Tensor | None]:
        """Return them as a layer takes them."""
        _, bounds, angles = tensors
        return PackedSeqParams(**packed_arguments(bounds, self._longest)), angles

    def samples(self, seen: Sequence[Sample]) -> Iterator[list[Sample]]:
        """Yield them alone."""
        yield [tuple(_copy(x) for x in sample) for sample in seen]

    def describe(self, tensors: tuple[Tensor, ...]) -> str:
        """Return what differs between graphs."""
        return f"{tensors[0].shape[0]} tokens and up to {tensors[1].shape[0] - 1} packed samples"

    def _padded_bounds(self, params: PackedSeqParams) -> Tensor:
        """As `padded_bounds`, once for all layers."""
        if self._bounds is None or self._bounds[0] is not params:
            assert params.cu_seqlens_q is not None
            self._bounds = params, padded_bounds(params.cu_seqlens_q)
        return self._bounds[1]

    def _angles(self, given: Tensor) -> Tensor:
        """Return rotary angles of a fixed shape: [longest, 1, 1, d], the same every time, or as given for each token
        where positions have several axes."""
        if self._model.shape.rope.axes is not None:
            return given
        if self._table is None:
            self._table = self._model.rotary_pos_emb(self._longest)
        return self._table


class PatchPacks:
    """Packs of patches, which the tower has filled up to one of its sizes.

    Each of the few sizes has a graph as soon as there is any, so that no pass beside the graphs needs memory of its
    own. Graphs of all sizes share the memory of their arguments: one of them runs at a time.
    """

    def __init__(self, tower: PatchTransformer) -> None:
        shape = tower.shape
        self._rotates, self._window = shape.inv_freq is not None, shape.window_patches
        self._sizes = tower.sizes

    def tensors(self, hidden_states: Tensor, packed: PackedSeqParams, angles: Tensor | None) -> tuple[Tensor, ...]:
        """Return hidden states, where pictures and windows begin, and angles; windows and angles where there are any.

        Windows at a picture's edges are smaller: there is room for twice as many as of full ones.
        """
        assert isinstance(packed, TowerSeqParams) and packed.cu_seqlens_q is not None
        number = packed.cu_seqlens_q.shape[0] - 1
        room = next((x for x in PICTURES if x >= number), 1)
        found = [hidden_states, padded_bounds(packed.cu_seqlens_q, room)]
        if packed.windows is not None:
            assert packed.windows.cu_seqlens_q is not None
            found.append(padded_bounds(packed.windows.cu_seqlens_q, self._most_windows(hidden_states.shape[0])))
        return (*found, *([] if angles is None else [angles]))

    def arguments(self, *tensors: Tensor) -> tuple[PackedSeqParams, Tensor | None]:
        """Return them as a layer takes them."""
        hidden_states, bounds, *rest = tensors
        windows = PackedSeqParams(**packed_arguments(rest[0], self._window)) if self._window else None
        whole = packed_arguments(bounds, hidden_states.shape[0])
        return TowerSeqParams(**whole, windows=windows), rest[-1] if self._rotates else None

    def samples(self, seen: Sequence[Sample]) -> Iterator[list[Sample]]:
        """Yield those of all sizes, the largest first, whose memory the others use."""
        largest = [self._resized(sample, self._sizes[-1]) for sample in seen]
        for size in reversed(self._sizes):
            yield [
                tuple(_part(x, y) for x, y in zip(whole, self._resized(sample, size), strict=True))
                for whole, sample in zip(largest, seen, strict=True)
            ]

    def _resized(self, sample: Sample, size: int) -> Sample:
        """Return blank arguments for so many patches, of one picture in full windows."""
        hidden_states, bounds, *rest = sample
        device, n = bounds.device, len(bounds)
        starts = [torch.tensor([0, *[size] * (n - 1)], dtype=torch.int32, device=device)]
        if self._window:
            ends = torch.arange(self._most_windows(size) + 1, dtype=torch.int32, device=device) * self._window
            starts.append(ends.clamp(max=size))
        angles = [rest[-1].new_zeros(size, *rest[-1].shape[1:])] if self._rotates else []
        blank = hidden_states.new_zeros(size, *hidden_states.shape[1:]).requires_grad_(hidden_states.requires_grad)
        return blank, *starts, *angles

    def _most_windows(self, size: int) -> int:
        return 2 * size // self._window

    def describe(self, tensors: tuple[Tensor, ...]) -> str:
        """Return what differs between graphs."""
        return f"{tensors[0].shape[0]} patches and up to {tensors[1].shape[0] - 1} pictures"


def _copy(x: Tensor) -> Tensor:
    """Return memory of a graph's own for an argument, with its values."""
    return x.detach().clone().requires_grad_(x.requires_grad)


def _part(whole: Tensor, wanted: Tensor) -> Tensor:
    """Return the first rows of `whole` with the shape, values and needs of `wanted`."""
    found = whole.detach()[: len(wanted)]
    return found.copy_(wanted.detach()).requires_grad_(wanted.requires_grad)


def padded_bounds(bounds: Tensor, least: int = 1) -> Tensor:
    """Return the starts of packed samples, [n + 1], with empty samples at the end: n becomes `least`, or if it is
    larger a power of two."""
    num_samples = bounds.shape[0] - 1
    missing = max(least, 1 << (num_samples - 1).bit_length() if num_samples > least else 0) - num_samples
    return torch.cat([bounds, bounds[-1:].expand(missing)]) if missing else bounds
