"""The arguments of a graph: tensors of a few fixed shapes, although no two packs are alike.

t: tokens or patches, h: hidden size, d: rotated dims of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from llava_mcore.models.vision.patches import PatchTransformer, TowerSeqParams, packed_arguments

PICTURES = (8, 32)
"""Images of a pack that graphs of a tower have room for. More room costs time, as cuDNN plans for all of it, and more
choices cost memory."""

Sample = tuple[Tensor, ...]
"""Arguments of one graph, the hidden states [t, 1, h] first."""


class Packs(Protocol):
    """Converts layers' arguments to tensors, and back."""

    def tensors(self, num_rows: int, packed: PackedSeqParams, angles: Tensor | None) -> tuple[Tensor, ...]:
        """Return what graphs take after the hidden states, for a pass of all layers.

        Args:
            num_rows: t of the hidden states.
        """

    def arguments(self, *sample: Tensor) -> tuple[PackedSeqParams, Tensor | None]:
        """Return where samples begin, and rotary angles, as a layer takes them."""

    def samples(self, seen: Sequence[Sample]) -> Iterator[list[Sample]]:
        """Yield arguments of every graph, in memory of their own, for all shapes that are needed if this one is.

        Args:
            seen: arguments of every graph, from one pass.
        """

    def describe(self, sample: Sample) -> str:
        """Return what graphs of these shapes are for."""


class TokenPacks:
    """Packs of tokens, all of the same length."""

    def __init__(self, longest: int) -> None:
        """`longest`: largest length of a sample."""
        self._longest = longest

    def tensors(self, num_rows: int, packed: PackedSeqParams, angles: Tensor | None) -> tuple[Tensor, ...]:
        """Return where samples begin, and angles."""
        assert packed.cu_seqlens_q is not None and angles is not None
        return padded_bounds(packed.cu_seqlens_q), angles

    def arguments(self, *sample: Tensor) -> tuple[PackedSeqParams, Tensor | None]:
        """Return them as a layer takes them."""
        _, bounds, angles = sample
        return PackedSeqParams(**packed_arguments(bounds, self._longest)), angles

    def samples(self, seen: Sequence[Sample]) -> Iterator[list[Sample]]:
        """Yield copies of them alone."""
        yield [tuple(_copy(x) for x in sample) for sample in seen]

    def describe(self, sample: Sample) -> str:
        """Return what differs between graphs."""
        return f"{sample[0].shape[0]} tokens and up to {sample[1].shape[0] - 1} packed samples"


class PatchPacks:
    """Packs of patches, which the tower has filled up to one of its sizes.

    All sizes get graphs as soon as one is needed, so that no pass without a graph needs memory beside theirs. Graphs of
    different sizes never run at the same time, and share the memory of their arguments.
    """

    def __init__(self, tower: PatchTransformer) -> None:
        shape = tower.shape
        self._rotates, self._window = shape.inv_freq is not None, shape.window_patches
        self._sizes = tower.sizes

    def tensors(self, num_rows: int, packed: PackedSeqParams, angles: Tensor | None) -> tuple[Tensor, ...]:
        """Return angles, and where images and windows begin; angles and windows where there are any."""
        assert isinstance(packed, TowerSeqParams) and packed.cu_seqlens_q is not None
        num_pictures = packed.cu_seqlens_q.shape[0] - 1
        tensors = [] if angles is None else [angles]
        tensors.append(padded_bounds(packed.cu_seqlens_q, next((x for x in PICTURES if x >= num_pictures), 1)))
        if packed.windows is not None:
            assert packed.windows.cu_seqlens_q is not None
            tensors.append(padded_bounds(packed.windows.cu_seqlens_q, self._most_windows(num_rows)))
        return tuple(tensors)

    def arguments(self, *sample: Tensor) -> tuple[PackedSeqParams, Tensor | None]:
        """Return them as a layer takes them."""
        hidden_states, *rest = sample
        angles = rest.pop(0) if self._rotates else None
        lengths = packed_arguments(rest[0], hidden_states.shape[0])
        windows = PackedSeqParams(**packed_arguments(rest[1], self._window)) if self._window else None
        return TowerSeqParams(**lengths, windows=windows), angles

    def samples(self, seen: Sequence[Sample]) -> Iterator[list[Sample]]:
        """Yield blank ones of all sizes, the largest first: one image, in full windows."""
        num_per_patch = 1 + self._rotates  # hidden states and angles
        room = seen[0][num_per_patch].shape[0] - 1
        shared = [[_blank(x, self._sizes[-1]) for x in sample[:num_per_patch]] for sample in seen]
        for size in reversed(self._sizes):
            yield [
                (*(_rows(x, size) for x in memory), *self._starts(size, room, memory[0].device)) for memory in shared
            ]

    def _starts(self, size: int, room: int, device: torch.device) -> Iterator[Tensor]:
        """Yield where images begin, if one has all patches, and where windows begin."""
        yield torch.tensor([0, *[size] * room], dtype=torch.int32, device=device)
        if self._window:
            indices = torch.arange(self._most_windows(size) + 1, dtype=torch.int32, device=device)
            yield (indices * self._window).clamp(max=size)

    def _most_windows(self, size: int) -> int:
        """Return how many windows there is room for: twice as many as of full ones, for those at pictures' edges."""
        return 2 * size // self._window

    def describe(self, sample: Sample) -> str:
        """Return what differs between graphs."""
        return f"{sample[0].shape[0]} patches and up to {sample[1 + self._rotates].shape[0] - 1} images"


def _copy(x: Tensor) -> Tensor:
    """Return a copy of an argument in the graph's own memory."""
    return x.detach().clone().requires_grad_(x.requires_grad)


def _blank(x: Tensor, num_rows: int) -> Tensor:
    """Return zeros with so many rows, otherwise as x."""
    return x.new_zeros(num_rows, *x.shape[1:]).requires_grad_(x.requires_grad)


def _rows(x: Tensor, num_rows: int) -> Tensor:
    """Return the first rows of x as an argument of its own, in the same memory."""
    return x.detach()[:num_rows].requires_grad_(x.requires_grad)


def padded_bounds(bounds: Tensor, least: int = 1) -> Tensor:
    """Return the starts of packed samples, [n + 1], with empty samples at the end: n becomes `least`, or if it is
    larger a power of two."""
    num_samples = bounds.shape[0] - 1
    missing = max(least, 1 << (num_samples - 1).bit_length() if num_samples > least else 0) - num_samples
    return torch.cat([bounds, bounds[-1:].expand(missing)]) if missing else bounds
